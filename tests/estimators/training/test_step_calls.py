"""A default training step never waits for a device and adds few operations to the network's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_training import config_of, train_gang
from step_calls import StepCalls, calls_of, operations_of, waiting_operations
from torch.nn import functional

from ringspark.estimators.collectives import COLLECTIVES
from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.models import ModelSpec

MODEL = ModelSpec("mlp", {"in_features": 4, "hidden": [8, 8], "out_features": 1})


@pytest.fixture
def config(make_shards: Any, tmp_path: Path) -> TrainConfig:
    generator = np.random.default_rng(0)
    columns = {"x": generator.normal(size=(320, 4)).astype(np.float32), "y": np.ones(320, np.float32)}
    return config_of(make_shards(columns), tmp_path / "run", model=MODEL.to_json(), optimizer="sgd")


def bare_operations() -> list[str]:
    """Returns the operations of a plain torch step."""
    module = MODEL.build()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    rows, label = torch.ones(32, 4), torch.ones(32)

    def step() -> None:
        optimizer.zero_grad()
        functional.mse_loss(module(rows).squeeze(-1), label).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return operations_of(step)


def check(path: Path, most_more: int) -> None:
    """Checks that a step never waits and adds at most `most_more` operations to the plain step."""
    operations, waits = calls_of(path)
    assert waits == waiting_operations(operations) == []
    bare = bare_operations()
    assert len(operations) <= len(bare) + most_more, sorted(set(operations) - set(bare))


def test_a_step_of_one_rank_waits_for_no_device(config: TrainConfig, tmp_path: Path) -> None:
    train_here(config, UserObjects(callbacks=(StepCalls(tmp_path / "calls"),)))
    # The loss over rows and over labels, their division, the epoch totals, and copies of the two columns if
    # they are not aligned in memory.
    check(tmp_path / "calls", 18)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("collective", [name for name in COLLECTIVES if name != "local"])
def test_a_step_of_a_gang_waits_for_no_device(config: TrainConfig, tmp_path: Path, collective: str) -> None:
    config = replace(config, collective=collective, num_workers=2)
    train_gang(config, UserObjects(callbacks=(StepCalls(tmp_path / "calls"),)))
    check(tmp_path / "calls", 28)
