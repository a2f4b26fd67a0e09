"""What a user reads for each bad input of tests/estimators/bad_inputs.py, and after how many seconds.

In a session that has fitted before. A row misses where the sentence lacks its subject or its remedy, takes
over 5 s, or something is left behind; with any, the exit code is 1.
"""

from __future__ import annotations

import sys
import tempfile
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import harness

from ringspark.jobs import cli

TARGET_SECONDS = 5.0
SHOWN = 110
TABLE = Path(__file__).parent.parent / "estimators" / "bad_inputs.py"


def load_table() -> Any:
    """The module of the table, which is in no package."""
    spec = spec_from_file_location("bad_inputs_table", TABLE)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> int:
    """Runs every row once."""
    harness.parse(__doc__)
    table = load_table()
    lines, misses = [], []
    with cli.spark("bad inputs") as spark, tempfile.TemporaryDirectory() as folder:
        spark.sparkContext.setLogLevel("OFF")
        place = table.Place(spark, Path(folder))
        for number, row in enumerate(table.BAD_INPUTS):
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
