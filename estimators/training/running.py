"""The present state of one rank's training: the loop changes it, and checkpoints copy it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ringspark.estimators.parallel.base import GradientSync
from ringspark.estimators.parallel.mesh import Mesh
from ringspark.estimators.training.callbacks import Callbacks, TrainingState
from ringspark.estimators.training.history import RunLog
from ringspark.estimators.training.non_finite import FirstBadLoss
from ringspark.estimators.training.objective.criterion import Criterion
from ringspark.estimators.training.objective.heads import Head
from ringspark.estimators.training.objective.sums import Sums
from ringspark.estimators.training.optimizers.schedules import Rates
from ringspark.estimators.training.precision import LossScaler
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.estimators.training.step import Recipe


@dataclass(kw_only=True)
class Running:
    """Everything on one rank that changes from step to step, and the position of the training.

    Attributes:
        sync: The network and its optimizer.
        recipe: How a micro-batch is computed; its scaler changes.
        sums: Sums of loss and metrics over the present epoch's rows.
        validation: Sums over the held-out rows, empty except during a validation.
        state: State that callbacks see: epoch, step, history.
        steps_per_epoch: Optimizer steps per epoch with this data and batch size.
        finished_epochs: Epochs with a record in the history.
        step_in_epoch: Steps done in the current epoch.
        skipped_before: Steps skipped before the current epoch.
        epoch_start: Start of the current epoch by `time.monotonic`, without pauses before a resume.
    """

    sync: GradientSync
    recipe: Recipe
    rates: Rates
    sums: Sums
    validation: Sums
    callbacks: Callbacks
    state: TrainingState
    log: RunLog
    first_bad: FirstBadLoss
    steps_per_epoch: int
    finished_epochs: int = 0
    step_in_epoch: int = 0
    skipped_before: int = 0
    epoch_start: float = 0.0

    @property
    def scaler(self) -> LossScaler:
        return self.recipe.scaler

    @property
    def device(self) -> torch.device:
        return self.recipe.device

    def end_epoch(self) -> None:
        """Counts an epoch as finished, once its record is in the history."""
        self.finished_epochs += 1
        self.step_in_epoch = 0
        self.skipped_before = self.scaler.skipped_steps
        self.epoch_start = time.monotonic()


def make_running(
    config: TrainConfig,
    mesh: Mesh,
    heads: Sequence[Head],
    sync: GradientSync,
    rates: Rates,
    callbacks: Callbacks,
    log: RunLog,
    steps_per_epoch: int,
    device: torch.device,
) -> Running:
    """Returns a training before its first step.

    Args:
        sync: Holds the network, already on `device`.
    """
    # Ranks that hold parts of the gradients must agree on overflows; else all see the same numbers.
    combine = partial(mesh.world.all_reduce, op="max") if config.sharding != "none" else None
    scaler = LossScaler(config.precision, device, combine, guards=config.on_non_finite != "stop")
    # In training mode an ensemble returns the logits of its members, not a prediction.
    predicts = not any(head.is_per_member for head in heads)
    return Running(
        sync=sync,
        recipe=Recipe(config=config, criterion=Criterion(heads, device), scaler=scaler, device=device),
        rates=rates,
        sums=Sums("train", heads, device, with_metrics=predicts),
        validation=Sums("validation", heads, device),
        callbacks=callbacks,
        state=TrainingState(
            rank=mesh.world.rank,
            size=mesh.world.size,
            module=sync.network,
            optimizer=sync.optimizer,
            num_steps=config.epochs * steps_per_epoch,
            history=log.history,
        ),
        log=log,
        first_bad=FirstBadLoss(device),
        steps_per_epoch=steps_per_epoch,
        epoch_start=time.monotonic(),
    )
