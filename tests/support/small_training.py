"""A small regression from shards: its settings, its gang of new processes, its weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ringspark.estimators import user_code
from ringspark.estimators.launch.local import run_spawned
from ringspark.estimators.launch.train_task import TrainTask
from ringspark.estimators.training.check.driver import check_training
from ringspark.estimators.training.checkpoint.weights import load_checkpoint
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.worker import TrainResult
from ringspark.pipelines import ShardManifest


def config_of(manifest: ShardManifest, run_uri: Path, **changes: Any) -> TrainConfig:
    """Two epochs of steps of 32 rows, from `x` to `y`; no model."""
    config = TrainConfig(
        shards_uri=manifest.uri,
        run_uri=str(run_uri),
        task="regression",
        losses=("mse",),
        input_columns=("x",),
        label_columns=("y",),
        batch_size=32,
        learning_rate=0.01,
        epochs=2,
        reader="arrow",
    )
    return replace(config, **changes)


def train_gang(config: TrainConfig, objects: UserObjects | None = None) -> TrainResult:
    """Checks and trains on `config.num_workers` ranks; what rank 0 returns."""
    return train_ranks(config, objects)[0]


def train_ranks(config: TrainConfig, objects: UserObjects | None = None) -> list[TrainResult]:
    """The same, with the results of all ranks."""
    objects = objects or UserObjects()
    config = check_training(config, objects, ShardManifest.load(config.shards_uri)).config
    task = TrainTask(config=config, objects=user_code.dumps(objects))
    texts = run_spawned(config.num_workers, config.collective, task, timeout_seconds=120)
    return [TrainResult.from_json(text) for text in texts]


def weights_of(result: TrainResult, module: nn.Module) -> torch.Tensor:
    """All parameters in a row, 1-D, as the checkpoint has them; `module` takes them."""
    load_checkpoint(result.checkpoint_uri, module)
    return torch.cat([p.detach().flatten() for p in module.parameters()])
