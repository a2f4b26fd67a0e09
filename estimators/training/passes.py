"""Forward and backward passes of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from ringspark.estimators.collectives.base import backward_errors
from ringspark.estimators.parallel.base import GradientSync
from ringspark.estimators.parallel.layout import layout_of
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.objective.sums import MicroBatchOutput
from ringspark.estimators.training.step import Recipe, forward, forward_backward

Counting = Callable[[Batch], AbstractContextManager[None]]
# Gets the number of a micro-batch, their count, and its rows.
Measure = Callable[[int, int, int], None]


class Passes(Protocol):
    """Forward and backward passes of one rank; every rank makes the same calls.

    Attributes:
        steps_in_flight: Number of steps whose gradients are still in flight; each `drain` accumulates one.
    """

    @property
    def steps_in_flight(self) -> int: ...

    def train(
        self,
        micro_batches: Sequence[Batch],
        divisor: torch.Tensor | float,
        *,
        inputs: Sequence[torch.Tensor],
        keeps_outputs: bool,
    ) -> list[MicroBatchOutput]:
        """Runs the forward and backward passes, accumulates gradients, and returns the results.

        The loss is the sum over these rows, divided by `divisor`, the weight of all ranks' rows (from
        `step.global_weights`). So the sum of all ranks' gradients is the gradient of the global mean loss.

        Each micro-batch has at least one row. A rank without rows gives no micro-batches, but `inputs` with
        the right shapes and dtypes.
        """

    def drain(self) -> None:
        """Accumulates the gradients of one of the `steps_in_flight`; the caller then steps the optimizer."""

    def settle(self) -> None:
        """Makes parameters that several ranks share bitwise equal. Runs on every rank."""

    def evaluate(self, micro_batch: Batch, *, keeps_outputs: bool) -> list[MicroBatchOutput]:
        """Returns a list with the result of one micro-batch, computed without gradients."""

    def evaluate_without_rows(self, inputs: Sequence[torch.Tensor]) -> None:
        """Takes part in the evaluation of a micro-batch without rows on this rank."""

    def share(self, values: dict[str, float]) -> dict[str, float]:
        """Returns the `values` of a rank that computes the losses. Runs on every rank."""


class WholePasses:
    """Passes over the rows of a rank that has all layers, or a shard of each."""

    steps_in_flight = 0

    def __init__(
        self,
        recipe: Recipe,
        sync: GradientSync,
        counting: Counting,
        measure: Measure | None = None,
    ) -> None:
        self._recipe, self._sync = recipe, sync
        self._counting, self._measure = counting, measure
        layout = layout_of(sync.network)
        self._complete_gradients = None if layout is None else layout.complete_gradients

    def train(
        self,
        micro_batches: Sequence[Batch],
        divisor: torch.Tensor | float,
        *,
        inputs: Sequence[torch.Tensor],
        keeps_outputs: bool,
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

    def drain(self) -> None:
        """Does nothing: no gradients are in flight."""

    def settle(self) -> None:
        """Does nothing: no parameters are shared with other ranks."""

    def evaluate(self, micro_batch: Batch, *, keeps_outputs: bool) -> list[MicroBatchOutput]:
        network = self._sync.network
        return [forward(self._recipe, network, network, micro_batch, keeps_outputs=keeps_outputs)[1]]

    def evaluate_without_rows(self, inputs: Sequence[torch.Tensor]) -> None:
        with backward_errors():
            self._sync.forward_without_rows(inputs)

    def share(self, values: dict[str, float]) -> dict[str, float]:
        return values


class Stages(Protocol):
    """This rank's stages of a pipeline."""

    layers: Any

    def make_passes(self, recipe: Recipe, sync: GradientSync, mesh: RankMesh) -> Passes: ...
