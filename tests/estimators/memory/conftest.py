"""The benchmark's measured step, for the tests that hold a plan against it."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")


@pytest.fixture(scope="session")
def benchmark_step() -> Iterator[Any]:
    """tests/benchmarks/plan_memory.py as a module."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        import plan_memory

        yield plan_memory
    # The benchmarks' short names must not be found by other tests.
    for name in {"plan_memory", "peak_memory", "harness"} - before:
        sys.modules.pop(name, None)
