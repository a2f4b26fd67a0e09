"""Measured steps of the benchmarks, for tests that compare a plan with them."""

from collections.abc import Iterator
from typing import Any

import pytest
from benchmark_module import imported_benchmark


@pytest.fixture(scope="session")
def benchmark_step() -> Iterator[Any]:
    """tests/benchmarks/plan_memory.py as a module."""
    with imported_benchmark("plan_memory") as module:
        yield module


@pytest.fixture
def benchmark_meshes() -> Iterator[Any]:
    """tests/benchmarks/plan_parallelism.py as a module that ranks can import."""
    with imported_benchmark("plan_parallelism") as module:
        yield module
