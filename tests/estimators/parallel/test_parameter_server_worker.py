"""`train_worker` with a parameter server: the model of a training without, checkpoints, slow workers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_training import config_of, train_gang, train_ranks, weights_of

from ringspark.estimators.training.settings.config import UserObjects
from ringspark.estimators.training.step_log import read_steps
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

SPEC = ModelSpec("mlp", {"in_features": 4, "hidden": [16], "out_features": 1, "dropout": 0.0})
MakeShards = Callable[..., ShardManifest]
_config = partial(config_of, model=SPEC.to_json(), num_workers=2, collective="torch")
_weights = partial(weights_of, module=SPEC.build())
APART: dict[str, dict[str, Any]] = {
    "ssp": {"name": "ssp", "staleness": 2, "correction": "none"},
    "asp": {"name": "asp", "correction": "staleness"},
    "hogwild": {"name": "hogwild"},
}
pytestmark = pytest.mark.distributed


def _shards(make_shards: MakeShards) -> ShardManifest:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(260, 4)).astype(np.float32)
    weight = rng.uniform(0.5, 2.0, size=260).astype(np.float32)
    columns = {"x": features, "y": features.sum(1).astype(np.float32), "w": weight}
    return make_shards(columns, validation=np.arange(260) >= 225)


def test_staleness_0_is_the_training_by_all_reduce_to_the_bit(
    make_shards: MakeShards, tmp_path: Path
) -> None:
    """Also with weighted rows, a schedule, and a last batch of one row, of which one rank has none."""
    changes: dict[str, Any] = {"optimizer": "momentum", "lr_schedule": "cosine", "weight_column": "w"}
    manifest = _shards(make_shards)
    plain = _config(manifest, tmp_path / "a", **changes)
    served = replace(
        plain, run_uri=str(tmp_path / "b"), consistency={"name": "ssp", "staleness": 0, "correction": "none"}
    )
    one, other = train_gang(plain), train_gang(served)
    assert torch.equal(_weights(one), _weights(other))
    assert one.history[-1].validation_loss == other.history[-1].validation_loss


class _SlowOnRankOne:
    """Sleeps on one rank: it is passed the step, not the rank, so it asks the process group."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # The driver tries it, outside a gang.
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            time.sleep(0.03)
        return x


@pytest.mark.parametrize("name", APART)
def test_workers_of_unequal_speed_learn_and_end_with_one_model(
    make_shards: MakeShards, tmp_path: Path, name: str
) -> None:
    config = _config(
        _shards(make_shards),
        tmp_path / "run",
        consistency=APART[name],
        weight_column="w",
        epochs=6,
        learning_rate=0.05,
        keep="best",
        log_every_steps=3,
        checkpoint_every_steps=5,
    )
    first, second = train_ranks(config, UserObjects(transform_batch=_SlowOnRankOne()))
    losses = [epoch.train_loss for epoch in first.history]
    assert losses[-1] < 0.3 * losses[0]
    # The validation is of the weights that all ranks have settled on.
    assert [e.validation_loss for e in first.history] == [e.validation_loss for e in second.history]
    assert not first.checkpoint_errors
    # Rank 0's own losses, at its own pace.
    assert [record.step for record in read_steps(config.run_uri)] == list(range(3, first.steps + 1, 3))


@pytest.mark.slow
@pytest.mark.parametrize("name", APART)
def test_a_training_goes_on_from_its_checkpoint(make_shards: MakeShards, tmp_path: Path, name: str) -> None:
    """Also with another number of workers: no rank alone knows anything that matters."""
    config = _config(
        _shards(make_shards),
        tmp_path / "run",
        consistency=APART[name],
        optimizer="momentum",
        epochs=4,
        pause_after=2,
        checkpoint_every_epochs=1,
    )
    before = train_gang(config)
    after = train_gang(replace(config, pause_after=None, num_workers=3))
    assert after.resumed_steps == (before.steps,)
    assert after.steps == 2 * before.steps
    assert after.history[:2] == before.history
    assert after.history[2].train_loss < before.history[0].train_loss
