"""What a user reads for each bad input of tests/support/bad_input_table.py, and after how many seconds.

In a session that has fitted before. A row misses where the sentence lacks its subject or its remedy, takes
over 5 s, or something is left behind; with any, the exit code is 1.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import harness
from bad_input_table import BAD_INPUTS, Place

from ringspark.jobs import cli

TARGET_SECONDS = 5.0
SHOWN = 110


def main() -> int:
    """Runs every row once."""
    harness.parse(__doc__)
    lines, misses = [], []
    with cli.spark("bad inputs") as spark, tempfile.TemporaryDirectory() as folder:
        spark.sparkContext.setLogLevel("OFF")
        place = Place(spark, Path(folder))
        for number, row in enumerate(BAD_INPUTS):
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
            elif not problem and seconds > TARGET_SECONDS:
                problem = f"took {seconds:.1f} s"
            lines.append((seconds, row.name, said))
            if problem:
                misses.append((row.name, problem, said))
    for seconds, name, said in lines:
        print(f"{name:40} {seconds:6.2f} s  {said if len(said) <= SHOWN else said[: SHOWN - 3] + '...'}")
    slowest = ", ".join(f"{name} {seconds:.2f} s" for seconds, name, _ in sorted(lines)[:-6:-1])
    print(f"\n{len(lines)} bad inputs, {len(misses)} misses; slowest: {slowest}")
    for name, problem, said in misses:
        print(f"missed: {name}: {problem}\n    {said}")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
