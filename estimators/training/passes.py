"""Forward and backward passes of a step, and a technique's own step in place of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.base import backward_errors
from ringspark.estimators.parallel.base import GradientSync
from ringspark.estimators.parallel.layout import layout_of
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.objective.sums import MicroBatchOutput
from ringspark.estimators.training.step import Recipe, forward, forward_backward
from ringspark.models.generators import Tensors
from ringspark.models.reports import CountingLayerInfo
from ringspark.pipelines.epoch_plan import EpochPlan

Inputs = Sequence[torch.Tensor]
# The weight of all ranks' rows, which divides the losses.
Divisor = torch.Tensor | float
Counting = Callable[[Batch], AbstractContextManager[None]]
# Gets the number of a micro-batch, their count, and its rows.
Measure = Callable[[int, int, int], None]


class Passes:
    """Forward and backward passes of one rank; every rank makes the same calls."""

    @property
    def steps_in_flight(self) -> int:
        """Number of steps whose gradients are still in flight; each `drain` accumulates one."""
        return 0

    def train(
        self, micro_batches: Sequence[Batch], divisor: Divisor, *, inputs: Inputs, keeps_outputs: bool
    ) -> list[MicroBatchOutput]:
        """Runs the forward and backward passes, accumulates gradients, and returns the results.

        The loss is the sum over these rows, divided by `divisor`, the result of `step.global_weights`. So the
        sum of all ranks' gradients is the gradient of the global mean loss.

        Each micro-batch has at least one row. A rank without rows gives no micro-batches, but `inputs` with
        the right shapes and dtypes.
        """
        raise NotImplementedError

    def drain(self) -> None:
        """Accumulates the gradients of one of the `steps_in_flight`; the caller then steps the optimizer."""

    def settle(self) -> None:
        """Makes parameters that several ranks share bitwise equal. Runs on every rank."""

    def evaluate(self, micro_batch: Batch, *, keeps_outputs: bool) -> list[MicroBatchOutput]:
        """Returns a list with the result of one micro-batch, computed without gradients."""
        raise NotImplementedError

    def evaluate_without_rows(self, inputs: Inputs) -> None:
        """Takes part in the evaluation of a micro-batch without rows on this rank."""

    def share(self, values: dict[str, float]) -> dict[str, float]:
        """Returns the `values` of a rank that computes the losses. Runs on every rank."""
        return values


class WholePasses(Passes):
    """Passes over the rows of a rank that has all layers, or a shard of each."""

    def __init__(
        self, recipe: Recipe, sync: GradientSync, counting: Counting, measure: Measure | None = None
    ) -> None:
        self._recipe, self._sync = recipe, sync
        self._counting, self._measure = counting, measure
        layout = layout_of(sync.network)
        self._complete_gradients = None if layout is None else layout.complete_gradients

    def train(
        self, micro_batches: Sequence[Batch], divisor: Divisor, *, inputs: Inputs, keeps_outputs: bool
    ) -> list[MicroBatchOutput]:
        if not micro_batches:
            with self._recipe.timeline.span("backward"):
                self._sync.backward_without_rows(inputs)
        results, count = [], len(micro_batches)
        for number, micro_batch in enumerate(micro_batches, 1):
            # Gradients must not be sent to other replicas before they are complete in this one.
            last = number == count and self._complete_gradients is None
            with self._sync.micro_batch(last=last), self._counting(micro_batch):
                result = forward_backward(
                    self._recipe, self._sync, micro_batch, divisor, keeps_outputs=keeps_outputs
                )
            results.append(result)
            if self._measure is not None:
                self._measure(number, count, micro_batch.num_rows)
        if self._complete_gradients is not None and count:
            with self._recipe.timeline.span("exchange"), backward_errors():
                self._complete_gradients()
        return results

    def evaluate(self, micro_batch: Batch, *, keeps_outputs: bool) -> list[MicroBatchOutput]:
        network = self._sync.network
        return [forward(self._recipe, network, network, micro_batch, keeps_outputs=keeps_outputs)[1]]

    def evaluate_without_rows(self, inputs: Inputs) -> None:
        with backward_errors():
            self._sync.forward_without_rows(inputs)


class Stages(NamedTuple):
    """This rank's stages of a pipeline; `layers` are the counting layers of the whole network."""

    layers: Sequence[CountingLayerInfo]
    make_passes: Callable[[Recipe, GradientSync, RankMesh], Passes]


class OwnStep(Protocol):
    """A technique's own step, which replaces the trainer's forward pass, loss and optimizer step.

    It runs once per step on every rank, also on a rank without rows, and makes the same collective calls
    there.
    """

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
