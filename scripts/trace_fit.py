"""Counts the functions that one `fit` runs on the driver.

    python scripts/trace_fit.py

Fits a `TorchClassifier` twice on 40 rows in local Spark, and counts during the second `fit`, when all modules
are imported. A profiler sees every call on the driver's main thread, but not the worker processes.

It prints:

- functions: the module-level functions of ringspark that ran (no methods, nested functions or lambdas), and
  their files;
- calls: all calls of named functions and methods of ringspark;
- the number of runs of each check that a fit needs once.

On 2026-11-26, before `CheckedTraining`: 244 functions in 88 files, 4,705 calls, 13 validated configs;
`make_heads` ran five times, and `check_columns`, `check_schema` and `expand_arguments` twice. After it: 243
functions in 88 files, 3,971 calls, 9 validated configs, and each check once. Most of the functions are shared
utilities such as storage, JSON and column types.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

# Functions that a fit should run once.
ONCE = (
    "training/check/driver.py:check_names",
    "training/check/data.py:check_columns",
    "training/check/driver.py:check_training",
    "training/check/schema.py:check_schema",
    "training/arguments.py:expand_arguments",
    "training/make_heads.py:make_heads",
)


def count_calls(run: Any) -> Counter[CodeType]:
    """Returns the calls of ringspark's functions on this thread during `run`."""
    import ringspark.estimators

    package = Path(ringspark.estimators.__file__).parent.parent
    calls: Counter[CodeType] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(f"{package}{os.sep}"):
            calls[frame.f_code] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return Counter({code: number for code, number in calls.items() if "<" not in code.co_name})


def count_checks(calls: Counter[CodeType]) -> dict[str, int]:
    """Returns how often each function of `ONCE` ran."""
    found = Counter({f"{code.co_filename}:{code.co_qualname}": number for code, number in calls.items()})
    return {name: sum(n for key, n in found.items() if key.endswith(f"/{name}")) for name in ONCE}


def main() -> None:
    """Fits twice and prints the counts of the second fit."""
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
    functions = {code for code in calls if code.co_qualname == code.co_name}
    files = {code.co_filename for code in functions}
    print(f"functions: {len(functions)} in {len(files)} files")
    print(f"calls: {sum(calls.values())}")
    validated = sum(n for code, n in calls.items() if code.co_qualname == "TrainConfig.__post_init__")
    print(f"validated configs: {validated}")
    for name, number in count_checks(calls).items():
        print(f"{name}: {number}")


if __name__ == "__main__":
    main()
