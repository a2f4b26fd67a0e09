"""Imports a benchmark as a module, for tests that compare a plan with its measured steps."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = str(Path(__file__).resolve().parents[1] / "benchmarks")


@contextmanager
def imported_benchmark(name: str) -> Iterator[Any]:
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module(name)
    # The benchmarks' short names must not be found by other tests.
    for found in {name, "plan_memory", "peak_memory", "harness"} - before:
        sys.modules.pop(found, None)
