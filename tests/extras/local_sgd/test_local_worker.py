"""`train_worker` with `localSteps`: a gang resumes after it stopped in the middle of a period."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from acting_callback import Acts, add_to_weights
from failing_callback import Fails
from parity import equal_to_undisturbed
from short_sync import sync_of
from small_networks import Net
from small_training import columns_of, config_of, train_gang, weights_of
from torch import nn

from ringspark.estimators import WorkerError
from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.settings.config import UserObjects
from ringspark.models import ModelSpec

pytestmark = pytest.mark.distributed
SPEC = ModelSpec("mlp", {"in_features": 4, "hidden": [8], "out_features": 1, "dropout": 0.2})
WAYS: dict[str, Any] = {
    "average": {"steps": 4, "after": 2},
    "streaming": {"name": "diloco", "steps": 4, "fragments": 2, "delay": 1, "alpha": 0.5, "send": "int8"},
    "elastic": {"name": "elastic", "steps": 4},
}


@pytest.fixture
def config(make_shards: Any, tmp_path: Path) -> Any:
    manifest = make_shards(columns_of(206), validation=np.arange(206) >= 200, row_group_rows=32)
    settings = {"optimizer": "adamw", "num_workers": 2, "checkpoint_every_steps": 5}
    return config_of(manifest, tmp_path / "run", model=SPEC, **settings)


# Adds to the weights whenever they are equal on all ranks.
ADDS = Acts(
    train_start=lambda state: add_to_weights(state, 100), epoch_end=lambda state: add_to_weights(state, 10)
)


def _still() -> nn.Module:
    compute = lambda self, x: (self.first + self.second).sum() * torch.zeros_like(x[:, :1])  # noqa: E731
    return Net(compute, first=nn.Parameter(torch.zeros(2)), second=nn.Parameter(torch.zeros(2)))


@pytest.mark.parametrize("way", ["one-shot", "streaming", "elastic"])
def test_what_a_callback_does_to_the_equal_weights_lasts(config: Any, way: str) -> None:
    """It must survive a resume too, because the first epoch's checkpoint contains the change."""
    sync = sync_of(local=WAYS.get(way, "training"))
    config = replace(config, sync=sync, model=None, optimizer="sgd", checkpoint_every_epochs=1)
    objects = UserObjects(module=_still(), callbacks=(ADDS,))
    train_gang(replace(config, pause_after=1), objects)
    result = train_gang(config, objects)
    assert weights_of(result, _still()).tolist() == [120.0] * 4


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_gang_that_stopped_in_mid_period_resumes_to_the_bit(config: Any, way: str) -> None:
    config = replace(config, sync=sync_of(local=WAYS[way]), collective="torch")
    straight, resumed = equal_to_undisturbed(config, step=6)
    assert resumed.resumed_steps == (5,)
    assert straight.history[-1].validation_loss == resumed.history[-1].validation_loss


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_another_number_of_workers_goes_on(config: Any, tmp_path: Path, way: str) -> None:
    config = replace(config, sync=sync_of(local=WAYS[way]))
    objects = UserObjects(callbacks=(Fails(tmp_path / "failed", step=6),))
    with pytest.raises(WorkerError, match="step 6"):
        train_gang(config, objects)
    result = train_here(config, objects)
    assert result.resumed_steps == (5,)
    losses = [record.train_loss for record in result.history]
    assert losses[-1] < losses[0]
