"""`train_worker`: what every rank runs, with Spark around it or without.

Plain arguments, importable, no pyspark: the same function serves a barrier task and a test.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel import STRATEGIES
from ringspark.estimators.training.check import build_module
from ringspark.estimators.training.checkpoint import save_checkpoint
from ringspark.estimators.training.config import TrainConfig, UserObjects, segment_policy
from ringspark.estimators.training.history import EpochRecord, RunLog
from ringspark.estimators.training.losses import LOSSES, from_user
from ringspark.estimators.training.optimizers import make_optimizer
from ringspark.estimators.training.schedules import SCHEDULES
from ringspark.estimators.training.status import Status
from ringspark.estimators.training.trainer import Trainer
from ringspark.models import apply_activation_checkpoint
from ringspark.pipelines import ShardManifest, open_reader, storage
from ringspark.pipelines.readers import ShardReader


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What comes back through Spark: a few kilobytes, never weights."""

    run_uri: str
    checkpoint_uri: str
    rows: int
    steps: int
    seconds: float
    history: tuple[EpochRecord, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TrainResult:
        values = json.loads(text)
        values["history"] = tuple(EpochRecord(**entry) for entry in values["history"])
        return cls(**values)


def train_worker(
    config: TrainConfig,
    collective: Collective,
    objects: UserObjects | None = None,
    device: str = "cpu",
    status: Status | None = None,
) -> TrainResult:
    """Trains the config's model on the config's shards. Runs on every rank.

    Args:
        config: The same value on all ranks.
        collective: Connected; stays open.
        objects: The user's module and callables, where the config has no name for them.
        device: This rank's torch device.
        status: Told the phase that the rank is in.

    Returns:
        The history and where rank 0 wrote the checkpoint; equal on all ranks but for `seconds`.
    """
    objects = objects or UserObjects()
    status = status or Status()
    torch_device = torch.device(device)
    start = time.monotonic()
    gpus = [torch_device] if torch_device.type == "cuda" else []
    # Seeds are set inside the fork only: a reused Python worker keeps its own random state.
    with torch.random.fork_rng(devices=gpus):
        status.phase = "opening the shards"
        train, validation = _open_readers(config, collective)
        status.phase = "building the model"
        # Any whole number is a seed; torch takes 64 bits.
        torch.manual_seed(config.seed % 2**63)
        module = build_module(config, objects).to(torch_device)
        if config.gradient_checkpointing != "none":
            apply_activation_checkpoint(module, segment_policy(config.gradient_checkpointing))
        status.phase = "sharing the first weights"
        sync = STRATEGIES["data_parallel"]().prepare(
            module, partial(_make_optimizer, config, objects), collective, config.gradient_accumulation
        )
        # Dropout differs between the ranks, as it does between the rows of one batch.
        torch.manual_seed((config.seed * 1_000_003 + collective.rank) % 2**63)
        log = RunLog(config.run_uri, writes=collective.rank == 0)
        trainer = Trainer(
            config=config,
            collective=collective,
            module=module,
            sync=sync,
            loss=from_user(objects.loss, torch_device) if objects.loss is not None else LOSSES[config.loss],
            schedule=objects.lr_schedule or SCHEDULES[config.lr_schedule],
            device=torch_device,
            log=log,
            status=status,
        )
        trainer.fit(train, validation)
    status.phase = "writing the checkpoint"
    checkpoint_uri = storage.join(config.run_uri, "checkpoint")
    steps = config.epochs * train.num_steps
    if collective.rank == 0:
        save_checkpoint(checkpoint_uri, module, epoch=config.epochs, step=steps)
    status.phase = "done"
    return TrainResult(
        run_uri=config.run_uri,
        checkpoint_uri=checkpoint_uri,
        rows=config.epochs * train.manifest.num_rows,
        steps=steps,
        seconds=time.monotonic() - start,
        history=tuple(log.history),
    )


def _open_readers(config: TrainConfig, collective: Collective) -> tuple[ShardReader, ShardReader | None]:
    manifest = ShardManifest.load(config.shards_uri)
    columns = [*config.input_columns, config.label_column]
    if config.weight_column is not None and config.weight_column not in columns:
        columns.append(config.weight_column)
    shared: dict[str, Any] = {
        "columns": list(dict.fromkeys(columns)),
        "shard": collective.rank,
        "num_shards": collective.size,
        "batch_size": config.batch_size,
        "seed": config.seed,
        "engine": config.reader,
    }
    train = open_reader(manifest.select("train"), shuffle=config.shuffle, **shared)
    held_out = manifest.select("validation")
    return train, open_reader(held_out, **shared) if held_out.num_rows else None


def _make_optimizer(
    config: TrainConfig, objects: UserObjects, parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    if objects.optimizer is not None:
        optimizer: torch.optim.Optimizer = objects.optimizer(parameters)
        return optimizer
    return make_optimizer(config.optimizer, parameters, config.learning_rate, config.weight_decay)
