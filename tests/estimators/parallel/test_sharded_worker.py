"""`train_worker` gives the model of one worker under every sharding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from short_sync import sync_of
from small_training import config_of, train_gang, weights_of
from torch import nn

from ringspark.estimators import WorkerError
from ringspark.estimators.collectives import COLLECTIVES
from ringspark.estimators.launch.local import train_here
from ringspark.estimators.options.sync import SHARDINGS, Zero
from ringspark.estimators.training.settings.config import UserObjects
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

SPEC = ModelSpec("mlp", {"in_features": 4, "hidden": [16] * 4, "out_features": 1, "dropout": 0.0})
MakeShards = Callable[..., ShardManifest]
_config = partial(config_of, model=SPEC.to_json())
_weights = partial(weights_of, module=SPEC.build())
SHARDED = [
    (sharding, collective)
    for sharding in SHARDINGS
    for collective in COLLECTIVES
    if collective != "local" and sharding != "none" and (sharding, collective) != ("parameters", "horovod")
]


def _columns(rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(rows, 4)).astype(np.float32)
    return {"x": features, "y": features.sum(1).astype(np.float32)}


@pytest.mark.distributed
@pytest.mark.parametrize(("sharding", "collective"), SHARDED)
def test_the_best_checkpoint_of_two_workers_is_that_of_one(make_shards, tmp_path, sharding, collective):
    """The last training batch and the only validation batch leave a rank without rows."""
    held_out = np.arange(104) >= 97
    manifest = make_shards(_columns(104), validation=held_out, row_group_rows=97)
    changes: dict[str, Any] = {
        "keep": "best",
        "gradient_accumulation": 2,
        "max_grad_norm": 0.5,
        "lr_schedule": "cosine",
        "parameter_groups": ({"params": ["*.bias"], "weightDecay": 0.0},),
    }
    one = train_here(_config(manifest, tmp_path / "one", **changes))
    two = _config(
        manifest,
        tmp_path / "two",
        num_workers=2,
        collective=collective,
        sync=sync_of(sharding=sharding),
        **changes,
    )
    result = train_gang(two)
    assert result.checkpoint_epoch == one.checkpoint_epoch
    assert (_weights(one) - _weights(result)).abs().max() < 1e-5
    assert result.history[-1].validation_loss == pytest.approx(one.history[-1].validation_loss, rel=1e-4)


@pytest.mark.distributed
@pytest.mark.parametrize("policy", [pytest.param("sqrt", marks=pytest.mark.slow), "all"])
def test_sharded_parameters_go_with_checkpointing_and_mixed_precision(make_shards, tmp_path, policy):
    manifest = make_shards(_columns(97))
    plain = _config(manifest, tmp_path / "a", num_workers=2, collective="torch", precision="bf16")
    sharded = replace(plain, run_uri=str(tmp_path / "b"), sync=Zero(stage=3), gradient_checkpointing=policy)
    assert (_weights(train_gang(plain)) - _weights(train_gang(sharded))).abs().max() < 1e-5


class _FailsOnRankOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and torch.distributed.is_initialized():
            self.calls += 1
            if self.calls == 3 and torch.distributed.get_rank() == 1:
                raise RuntimeError("the model broke")
        return self.blocks(x)  # type: ignore[no-any-return]


@pytest.mark.distributed
@pytest.mark.parametrize("sharding", ["gradients", "parameters"])
def test_a_model_that_raises_on_one_rank_ends_the_others(make_shards, tmp_path, sharding):
    manifest = make_shards(_columns(200))
    config = _config(
        manifest,
        tmp_path / "run",
        model=None,
        num_workers=2,
        collective="torch",
        sync=sync_of(sharding=sharding),
    )
    with pytest.raises(WorkerError, match=r"rank 1 .* step 3': RuntimeError: the model broke") as caught:
        train_gang(config, UserObjects(module=_FailsOnRankOne()))
    assert {f.rank: f.from_peer for f in caught.value.failures}.get(0, True)
