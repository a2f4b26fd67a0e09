"""What a user reads for each bad input of tests/support/bad_input_table.py, and after how many seconds.

In a session that has fitted before. A row misses where the sentence lacks its subject or its remedy, takes
longer than `--seconds`, or something is left behind; with any, the exit code is 1.
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
    # A tiny run only shows that it runs, and may do so on a busy machine.
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
        ["", "seconds", "what is said".ljust(SHOWN)],
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
