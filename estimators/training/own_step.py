"""A technique's own step, which replaces the trainer's forward pass, loss and optimizer step.

It runs once per step on every rank, also on a rank without rows, and makes the same collective calls there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from ringspark.estimators.collectives import Collective
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.objective.sums import MicroBatchOutput
from ringspark.models.generators import Tensors
from ringspark.pipelines.epoch_plan import EpochPlan


class OwnStep(Protocol):
    """Runs the steps of one rank."""

    def train(
        self, batch: Batch, plan: EpochPlan, step: int, number: int, epoch: int
    ) -> MicroBatchOutput | None:
        """Runs one training step, which may step the optimizer several times. Runs on every rank.

        Returns None if fp16 overflowed.

        Args:
            step: Step within the epoch, from 0.
            number: Step within the training, from 0.
        """

    def evaluate(
        self, batch: Batch, plan: EpochPlan, step: int, epoch: int, *, keeps_outputs: bool
    ) -> MicroBatchOutput:
        """Computes the losses of held-out rows, without optimizer steps. Runs on every rank."""

    def take(self, split: str, data: Collective) -> dict[str, float]:
        """Returns the means of an epoch's logged values over the ranks of `data`, and resets them."""

    def state(self) -> Tensors: ...

    def load(self, states: Sequence[Mapping[str, torch.Tensor]]) -> None: ...
