"""Trainings without Spark."""

from pathlib import Path
from typing import Any

import pytest
from ranks import GANGS
from small_training import Runs


@pytest.fixture
def runs(make_shards: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Runs:
    """Trains with the settings `SETTINGS` of the test's file."""
    return Runs(make_shards, tmp_path, getattr(request.module, "SETTINGS", {}))


def _param(name: str) -> Any:
    slow = [pytest.mark.slow] if name != "torch" else []
    return pytest.param(name, marks=[pytest.mark.distributed, *slow])


@pytest.fixture(params=[_param(name) for name in GANGS])
def collective(request: pytest.FixtureRequest) -> str:
    """The collective of several ranks: torch in quick tests, every other one in slow tests."""
    return str(request.param)
