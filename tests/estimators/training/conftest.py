"""Trainings without Spark."""

from pathlib import Path
from typing import Any

import pytest
from small_training import Runs


@pytest.fixture
def runs(make_shards: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Runs:
    """Trains with the settings `SETTINGS` of the test's file."""
    return Runs(make_shards, tmp_path, getattr(request.module, "SETTINGS", {}))
