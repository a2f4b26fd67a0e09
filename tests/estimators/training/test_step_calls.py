"""A default training step never waits for a device and adds few operations to the network's own."""

from pathlib import Path

import pytest
import torch
from small_training import Runs
from step_calls import StepCalls, calls_of, operations_of, waiting_operations
from torch.nn import functional

from ringspark.estimators.training.settings.config import UserObjects
from ringspark.models import ModelSpec

MODEL = ModelSpec("mlp", {"in_features": 4, "hidden": [8, 8], "out_features": 1})
SETTINGS = {"model": MODEL, "optimizer": "sgd"}


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


def test_a_step_of_one_rank_waits_for_no_device(runs: Runs, tmp_path: Path) -> None:
    runs.here(320, UserObjects(callbacks=(StepCalls(tmp_path / "calls"),)))
    # The loss over rows and over labels, their division, the epoch totals, and copies of the two columns if
    # they are not aligned in memory.
    check(tmp_path / "calls", 18)


@pytest.mark.slow
def test_a_step_of_a_gang_waits_for_no_device(runs: Runs, tmp_path: Path, collective: str) -> None:
    runs.gang(320, UserObjects(callbacks=(StepCalls(tmp_path / "calls"),)), collective=collective)
    check(tmp_path / "calls", 28)
