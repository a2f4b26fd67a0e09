"""The benchmarks' measured steps, for the tests that hold a plan against them."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")


@contextmanager
def _benchmark(name: str) -> Iterator[Any]:
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module(name)
    # The benchmarks' short names must not be found by other tests.
    for found in {name, "plan_memory", "peak_memory", "harness"} - before:
        sys.modules.pop(found, None)


@pytest.fixture(scope="session")
def benchmark_step() -> Iterator[Any]:
    """tests/benchmarks/plan_memory.py as a module."""
    with _benchmark("plan_memory") as module:
        yield module


@pytest.fixture
def benchmark_meshes() -> Iterator[Any]:
    """tests/benchmarks/plan_parallelism.py as a module, which ranks find too."""
    with _benchmark("plan_parallelism") as module:
        yield module
