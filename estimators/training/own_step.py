"""A custom training step, which replaces the trainer's forward pass, loss and optimizer step.

`ringspark.extras.training_steps` calls the function `trainingStep` once per step on every rank, also on a
rank without rows. The function makes the same collective calls on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from ringspark.estimators.collectives import Collective
from ringspark.estimators.lazy_imports import load_object
from ringspark.estimators.parallel.base import GradientSync
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.objective.sums import MicroBatchOutput
from ringspark.estimators.training.precision import LossScaler
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.models.generators import Tensors
from ringspark.pipelines import ShardManifest
from ringspark.pipelines.epoch_plan import EpochPlan

_RUNNER = "ringspark.extras.training_steps.runner:StepRunner"
_TRY = "ringspark.extras.training_steps.runner:try_step"


class OwnStep(Protocol):
    """Runs `trainingStep` on one rank."""

    def train(
        self, batch: Batch, plan: EpochPlan, step: int, number: int, epoch: int
    ) -> MicroBatchOutput | None:
        """Takes the optimizer steps of a step; returns None if fp16 overflowed. Runs on every rank.

        Args:
            step: Step within the epoch, from 0.
            number: Step within the training, from 0.
        """

    def evaluate(
        self, batch: Batch, plan: EpochPlan, step: int, epoch: int, *, keeps_outputs: bool
    ) -> MicroBatchOutput:
        """Computes the losses of held-out rows, without optimizer steps. Runs on every rank."""

    def take(self, split: str, data: Collective) -> dict[str, float]:
        """Returns the means of the logged values of an epoch, and resets them. Runs on every rank."""

    def state(self) -> Tensors: ...

    def load(self, states: Sequence[Mapping[str, torch.Tensor]]) -> None: ...


def make_own_step(
    config: TrainConfig,
    objects: UserObjects,
    sync: GradientSync,
    scaler: LossScaler,
    mesh: RankMesh,
    device: torch.device,
) -> OwnStep | None:
    if config.training_step is None:
        return None
    runner: OwnStep = load_object(_RUNNER)(config, objects, sync, scaler, mesh, device)
    return runner


def check_own_step(config: TrainConfig, objects: UserObjects, module: Any, manifest: ShardManifest) -> None:
    """Calls `trainingStep` once on sample rows, without optimizer steps. Runs on the driver."""
    if config.training_step is not None:
        load_object(_TRY)(config, objects, module, manifest)
