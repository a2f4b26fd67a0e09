"""Counts the functions that one `fit` runs on the driver.

    python scripts/trace_fit.py

Fits a `TorchClassifier` on 40 rows in local Spark, and counts after the first `fit`, when all modules are
imported. A profiler sees every call on the driver's main thread, but not the worker processes.

It prints:

- functions: the module-level functions of the five product folders that ran (no methods, nested functions or
  lambdas), and their files; also without those in pipelines/;
- the functions that nothing but `check_training` calls, directly or not;
- calls: all calls of named functions and methods of the product;
- the number of runs of each check that a fit needs once.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

FOLDERS = ("pipelines", "models", "estimators", "jobs", "extras")
# Functions that a fit should run once.
ONCE = (
    "training/check/driver.py:check_names",
    "training/check/data.py:check_columns",
    "training/check/driver.py:check_training",
    "training/check/schema.py:check_schema",
    "training/arguments.py:expand_arguments",
    "training/make_heads.py:make_heads",
)


def count_calls(run: Any, without: str = "") -> Counter[CodeType]:
    """Returns the product's calls on this thread during `run`, without those below a function's frame."""
    import ringspark.estimators

    root = Path(ringspark.estimators.__file__).resolve().parent.parent
    folders = tuple(f"{root / name}{os.sep}" for name in FOLDERS)
    resolve = cache(os.path.realpath)
    calls: Counter[CodeType] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not resolve(frame.f_code.co_filename).startswith(folders):
            return
        if not without or all(code.co_name != without for code in _stack(frame)):
            calls[frame.f_code] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return Counter({code: number for code, number in calls.items() if "<" not in code.co_name})


def _stack(frame: FrameType | None) -> Iterable[CodeType]:
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def find_functions(calls: Iterable[CodeType]) -> set[tuple[str, str]]:
    """Returns the file and the name of every module-level function."""
    return {(code.co_filename, code.co_name) for code in calls if code.co_qualname == code.co_name}


def describe(functions: set[tuple[str, str]]) -> str:
    """Returns the number of functions and of their files, with and without pipelines/."""
    outside = {(file, name) for file, name in functions if f"{os.sep}pipelines{os.sep}" not in file}
    counts = [f"{len(found)} in {len({file for file, _ in found})} files" for found in (functions, outside)]
    return f"{counts[0]}; outside pipelines/ {counts[1]}"


def count_checks(calls: Counter[CodeType]) -> dict[str, int]:
    """Returns how often each function of `ONCE` ran."""
    found = Counter({f"{code.co_filename}:{code.co_qualname}": number for code, number in calls.items()})
    return {name: sum(n for key, n in found.items() if key.endswith(f"/{name}")) for name in ONCE}


def main() -> None:
    """Fits three times and prints the counts of the later fits."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    from ringspark.estimators import TorchClassifier
    from ringspark.models import ModelSpec

    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    rows = [([float(i), 1.0, 2.0, 3.0], i % 2) for i in range(40)]
    table = spark.createDataFrame(rows, "features array<double>, label int")
    model = ModelSpec("mlp", {"in_features": 4, "hidden": [8], "out_features": 2})
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"epochs": 1, "batchSize": 8, "numWorkers": 2, "storageUri": folder}
        TorchClassifier(model=model, **settings).fit(table)
        estimator = TorchClassifier(model=model, **settings)
        calls = count_calls(lambda: estimator.fit(table))
        others = count_calls(lambda: estimator.fit(table), without="check_training")
    functions = find_functions(calls)
    print(f"functions: {describe(functions)}")
    print(f"only below check_training: {describe(functions - find_functions(others))}")
    print(f"calls: {sum(calls.values())}")
    checked = sum(n for code, n in calls.items() if code.co_qualname == "TrainConfig._check_rules")
    print(f"checked configs: {checked}")
    for name, number in count_checks(calls).items():
        print(f"{name}: {number}")


if __name__ == "__main__":
    main()
