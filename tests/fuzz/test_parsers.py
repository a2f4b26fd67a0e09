"""For any file content, a parser returns or raises a documented error. `run.py` runs longer."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import mutations
import pytest
from hypothesis import HealthCheck, given, settings
from targets import targets as all_targets

EXAMPLES = 60
NAMES = [
    "manifest", "manifest of a table", "thrift",
    "checkpoint.json", "training.json", "training.json of parts", "config.json", "model spec",
    "history.json", "progress.json", "run.json", "heartbeat", "safetensors",
    "etl.py", "score.py",
    "TorchRegressor ringspark.json", "TorchRegressor metadata/part-00000",
    "TorchRegressionModel ringspark.json", "TorchRegressionModel metadata/part-00000",
]  # fmt: skip


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return all_targets(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.extras
def test_every_target_has_a_test(targets: dict[str, Any]) -> None:
    assert sorted(targets) == sorted(NAMES)


@pytest.mark.extras
@pytest.mark.parametrize("name", NAMES)
def test_only_documented_errors_come_out(targets: dict[str, Any], name: str) -> None:
    target = targets[name]
    target.parse(target.good)

    @settings(
        max_examples=EXAMPLES, derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(mutations.damaged(target))
    def check(data: bytes) -> None:
        with suppress(*target.errors):
            target.parse(data)

    check()
