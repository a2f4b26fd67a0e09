"""`train_worker` with `localSteps`: a gang resumes after it stopped in the middle of a period."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from short_sync import sync_of
from small_training import config_of, train_gang, weights_of
from torch import nn

from ringspark.estimators import WorkerError
from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.estimators.training.settings.config import UserObjects
from ringspark.models import ModelSpec

SPEC = ModelSpec("mlp", {"in_features": 4, "hidden": [8], "out_features": 1, "dropout": 0.2})
_weights = partial(weights_of, module=SPEC.build())
WAYS: list[Any] = [
    {"steps": 4, "after": 2},
    {"name": "diloco", "steps": 4, "fragments": 2, "delay": 1, "alpha": 0.5, "send": "int8"},
    {"name": "elastic", "steps": 4},
]


class _Stops(Callback):
    """Raises after step `at`, in the middle of a period, one step after the checkpoint."""

    def __init__(self, at: int | None) -> None:
        self.at = at

    def on_step_end(self, state: TrainingState) -> None:
        if state.step == self.at:
            raise RuntimeError("stopped")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return


def _config(make_shards: Any, folder: Path, way: Any, name: str) -> Any:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(206, 4)).astype(np.float32)
    manifest = make_shards({"x": x, "y": x.sum(1)}, validation=np.arange(206) >= 200, row_group_rows=32)
    return config_of(
        manifest,
        folder / name,
        model=SPEC.to_json(),
        optimizer="adamw",
        num_workers=2,
        sync=sync_of(local=way),
        checkpoint_every_steps=5,
    )


class _Adds(Callback):
    """Adds to the weights whenever they are equal on all ranks."""

    def on_train_start(self, state: TrainingState) -> None:
        self._add(state, 100)

    def on_epoch_end(self, state: TrainingState) -> None:
        self._add(state, 10)

    def _add(self, state: TrainingState, number: int) -> None:
        with torch.no_grad():
            for parameter in state.module.parameters():
                parameter += number


class _Still(nn.Module):
    """Has weights with zero gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.first + self.second).sum() * torch.zeros_like(x[:, :1])


@pytest.mark.distributed
@pytest.mark.parametrize("way", ["training", *WAYS[1:]], ids=["one-shot", "streaming", "elastic"])
def test_what_a_callback_does_to_the_equal_weights_lasts(make_shards: Any, tmp_path: Path, way: Any) -> None:
    """It must survive a resume too, because the first epoch's checkpoint contains the change."""
    config = _config(make_shards, tmp_path, way, "run")
    config = replace(config, model=None, optimizer="sgd", checkpoint_every_epochs=1)
    objects = UserObjects(module=_Still(), callbacks=(_Adds(),))
    train_gang(replace(config, pause_after=1), objects)
    result = train_gang(config, objects)
    assert weights_of(result, _Still()).tolist() == [120.0] * 4


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("collective", ["torch", "horovod"])
@pytest.mark.parametrize("way", WAYS, ids=["average", "streaming", "elastic"])
def test_a_gang_that_stopped_in_mid_period_resumes_to_the_bit(
    make_shards: Any, tmp_path: Path, way: Any, collective: str
) -> None:
    whole = replace(_config(make_shards, tmp_path, way, "whole"), collective=collective)
    part = replace(whole, run_uri=str(tmp_path / "part"))
    expected = train_gang(whole, UserObjects(callbacks=(_Stops(None),)))
    with pytest.raises(WorkerError, match="stopped"):
        train_gang(part, UserObjects(callbacks=(_Stops(6),)))
    result = train_gang(part, UserObjects(callbacks=(_Stops(None),)))
    assert result.resumed_steps == (5,)
    assert torch.equal(_weights(expected), _weights(result))
    assert expected.history[-1].validation_loss == result.history[-1].validation_loss


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("way", WAYS, ids=["average", "streaming", "elastic"])
def test_another_number_of_workers_goes_on(make_shards: Any, tmp_path: Path, way: Any) -> None:
    config = _config(make_shards, tmp_path, way, "part")
    with pytest.raises(WorkerError, match="stopped"):
        train_gang(config, UserObjects(callbacks=(_Stops(6),)))
    result = train_here(config, UserObjects(callbacks=(_Stops(None),)))
    assert result.resumed_steps == (5,)
    losses = [record.train_loss for record in result.history]
    assert losses[-1] < losses[0]
