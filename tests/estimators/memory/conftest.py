"""Loads the measured steps of the benchmarks, for tests that compare a memory plan with them."""

from collections.abc import Iterator
from typing import Any

import pytest
from benchmark_module import imported_benchmark


@pytest.fixture(scope="session")
def benchmark_step() -> Iterator[Any]:
    """Imports tests/benchmarks/plan_memory.py."""
    with imported_benchmark("plan_memory") as module:
        yield module
