"""Trains on shards that are written without Spark, on one rank in this process."""

from __future__ import annotations

import uuid
from typing import Any

import torch

from check.part import Setup
from check.workloads import Batch, Workload
from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.callbacks import Callback
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.worker import TrainResult
from ringspark.pipelines import ShardManifest, open_reader


def train(
    manifest: ShardManifest, work: Workload, setup: Setup, *callbacks: Callback, **settings: Any
) -> TrainResult:
    """Trains the network of `work` on all columns of the shards; the last column is the label."""
    *inputs, label = (column.name for column in manifest.columns)
    task, loss = ("classification", "cross_entropy") if work.classes else ("regression", "mse")
    run = str(setup.folder / f"run-{uuid.uuid4().hex}")
    given = {"shards_uri": manifest.uri, "run_uri": run, "model": work.spec.to_json(), "reader": "arrow"}
    given |= {"input_columns": tuple(inputs), "label_columns": (label,), "batch_size": work.rows}
    given |= {"task": task, "losses": (loss,), "use_gpu": setup.on_gpu}
    config = TrainConfig(**given | settings)
    return train_here(config, UserObjects(callbacks=callbacks), device=setup.device)


def read_batches(manifest: ShardManifest, batch_size: int) -> list[Batch]:
    """Returns the batches of an epoch with all columns, in pinned memory."""
    batches = open_reader(manifest, batch_size=batch_size, engine="arrow").batches(0)
    return [tuple(torch.tensor(column).pin_memory() for column in batch.values()) for batch in batches]
