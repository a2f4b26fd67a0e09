"""One rank's training as it stands: what the loop works with, and what a checkpoint is made of."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ringspark.estimators.parallel.gradient_sync import GradientSync
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
    """Everything of one rank that changes from step to step, and how far it is.

    Attributes:
        sync: The network and its optimizer.
        recipe: How a micro-batch is computed; its scaler changes.
        sums: Of the present epoch's rows.
        validation: The same of the held-out rows, empty but during a validation.
        state: What callbacks see: epoch, step, history.
        steps_per_epoch: Optimizer steps that this data and batch size make.
        finished_epochs: Those with a record in the history.
        step_in_epoch: Steps done in the epoch after those.
        skipped_before: Steps skipped before that epoch.
        epoch_start: When it began, by `time.monotonic`, without pauses between continuations.
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
    """A training before its first step.

    Args:
        sync: With the network on `device`.
    """
    # Ranks with parts of the gradients must agree on overflows; with all of them, they see the same.
    combine = partial(mesh.world.all_reduce, op="max") if config.sharding != "none" else None
    scaler = LossScaler(config.precision, device, combine, guards=config.on_non_finite != "stop")
    # In training mode an ensemble gives the logits of its members, not a prediction.
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
