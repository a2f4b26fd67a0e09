"""Error messages for each bad input of tests/support/bad_input_table.py, and the seconds until they appear.

Runs in a session that has fitted before. A row fails if the message lacks its subject or its remedy, if it
takes longer than `--seconds`, or if something is left behind. The exit code is then 1.
"""

from __future__ import annotations

import sys
import tempfile
import textwrap
import time
from pathlib import Path

import harness
from bad_input_table import BAD_INPUTS, Place

from ringspark.jobs import cli

SHOWN = 110


def main() -> int:
    """Runs every row once."""
    # A tiny run has no time limit, because the machine may be busy.
    options = harness.parse(__doc__, inputs=(len(BAD_INPUTS), 10), seconds=(5, 600))
    lines, misses = [], []
    with cli.spark("bad inputs") as spark, tempfile.TemporaryDirectory() as folder:
        spark.sparkContext.setLogLevel("OFF")
        place = Place(spark, Path(folder))
        for number, row in enumerate(BAD_INPUTS[: options.inputs]):
            place.enter(Path(folder) / f"row-{number}")
            problem, said = "nothing was refused", ""
            start = time.perf_counter()
            try:
                row.do(place)
            except Exception as error:
                problem, said = row.problem(error), f"{type(error).__name__}: {error}".replace(folder, "")
            seconds = time.perf_counter() - start
            left = place.holds() - place.before
            if left:
                problem = f"{problem} left behind: {sorted(left)}".strip()
            elif not problem and seconds > options.seconds:
                problem = f"took {seconds:.1f} s"
            lines.append((seconds, row.name, said))
            if problem:
                misses.append((row.name, problem, said))
    harness.print_table(
        f"bad_inputs: {len(lines)} inputs, {len(misses)} misses",
        ["", "seconds", "message".ljust(SHOWN)],
        [
            [name, f"{seconds:.2f}", textwrap.shorten(said, SHOWN).ljust(SHOWN)]
            for seconds, name, said in lines
        ],
    )
    slowest = ", ".join(f"{name} {seconds:.2f} s" for seconds, name, _ in sorted(lines)[:-6:-1])
    print(f"slowest: {slowest}")
    for name, problem, said in misses:
        print(f"missed: {name}: {problem}\n    {said}")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
