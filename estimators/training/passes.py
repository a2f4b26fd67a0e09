"""Forward and backward passes of a step, over a whole network or over this rank's pipeline stages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from ringspark.estimators.collectives.base import backward_errors, gather_bytes
from ringspark.estimators.parallel.base import GradientSync
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.parallel.model.pipeline.passes import PipelinePasses
from ringspark.estimators.parallel.model.tensor import PartialGradients
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.history import PrivacySpent
from ringspark.estimators.training.objective.sums import MicroBatchOutput
from ringspark.estimators.training.precision import autocast
from ringspark.estimators.training.step import (
    Recipe,
    compute_losses,
    forward,
    forward_backward,
    scale_loss,
    sum_layer_losses,
)
from ringspark.models.outputs import as_outputs
from ringspark.models.reports import Reports, collect_reports

Counting = Callable[[Batch], AbstractContextManager[None]]
# Gets the number of a micro-batch, their count, and its rows.
Measure = Callable[[int, int, int], None]


class WholePasses:
    """Passes over the rows of a rank that has all layers, or a shard of each."""

    steps_in_flight = 0

    def __init__(
        self,
        recipe: Recipe,
        sync: GradientSync,
        counting: Counting,
        measure: Measure | None = None,
        partial_gradients: PartialGradients | None = None,
    ) -> None:
        self._recipe, self._sync = recipe, sync
        self._counting, self._measure = counting, measure
        self._partial = partial_gradients

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
        if not micro_batches:
            with self._recipe.timeline.span("backward"):
                self._sync.backward_without_rows(inputs)
        results, count = [], len(micro_batches)
        for number, micro_batch in enumerate(micro_batches, 1):
            # Gradients must not be sent to other replicas before they are complete in this one.
            last = number == count and self._partial is None
            with self._sync.micro_batch(last=last), self._counting(micro_batch):
                result = forward_backward(
                    self._recipe, self._sync, micro_batch, divisor, keeps_outputs=keeps_outputs
                )
            results.append(result)
            if self._measure is not None:
                self._measure(number, count, micro_batch.num_rows)
        if self._partial is not None and count:
            with self._recipe.timeline.span("exchange"), backward_errors():
                self._partial.add()
        return results

    def drain(self) -> None:
        """Accumulates the gradients of one of the `steps_in_flight`; the caller then steps the optimizer."""

    def settle(self) -> None:
        """Makes parameters that several ranks share bitwise equal. Runs on every rank."""

    def evaluate(self, micro_batch: Batch, *, keeps_outputs: bool) -> list[MicroBatchOutput]:
        """Returns a list with the result of one micro-batch, computed without gradients."""
        network = self._sync.network
        return [forward(self._recipe, network, network, micro_batch, keeps_outputs=keeps_outputs)[1]]

    def evaluate_without_rows(self, inputs: Sequence[torch.Tensor]) -> None:
        """Takes part in the evaluation of a micro-batch without rows on this rank."""
        with backward_errors():
            self._sync.forward_without_rows(inputs)

    def share(self, values: dict[str, float]) -> dict[str, float]:
        """Returns the `values` of a rank that computes the losses. Runs on every rank."""
        return values

    def privacy_spent(self) -> PrivacySpent | None:
        """Returns the privacy loss so far; None in a training without privacy, and except on rank 0."""
        return None


class PipelinedPasses:
    """Passes of a rank with some pipeline stages; the rank with the last layers has the losses."""

    def __init__(self, recipe: Recipe, sync: GradientSync, pipeline: PipelinePasses, mesh: RankMesh) -> None:
        self._recipe, self._sync, self._pipeline = recipe, sync, pipeline
        self._axis = mesh.axes["pipeline"]
        self._autocast = partial(autocast, recipe.config.precision, recipe.device)
        self._rounds = recipe.config.gradient_accumulation if mesh.sizes["expert"] > 1 else 0
        # Losses and counts of this rank's layers in the newest forward pass.
        self._reports = Reports()
        pipeline.module = sync.module

    @property
    def steps_in_flight(self) -> int:
        return self._pipeline.steps_in_flight

    def train(
        self,
        micro_batches: Sequence[Batch],
        divisor: torch.Tensor | float,
        *,
        inputs: Sequence[torch.Tensor],
        keeps_outputs: bool,
    ) -> list[MicroBatchOutput]:
        recipe, results = self._recipe, []

        def loss(outputs: Any, index: int) -> torch.Tensor:
            if index >= len(micro_batches):
                return _sum_nothing([*as_outputs(outputs), *self._reports.losses])
            batch = micro_batches[index]
            losses, own = compute_losses(
                recipe, self._sync.network, outputs, batch, self._reports, keeps_outputs=keeps_outputs
            )
            results.append(own)
            return scale_loss(recipe, self._sync, losses, divisor)

        def layer_loss(index: int) -> torch.Tensor | None:
            reports = self._reports
            if index >= len(micro_batches):
                return _sum_nothing(reports.losses) if reports.losses else None
            if reports.counts:
                results.append(self._make_result(reports))
            if not reports.losses:
                return None
            losses = sum_layer_losses(recipe, reports, micro_batches[index])
            return scale_loss(recipe, self._sync, losses, divisor)

        arguments = [batch.inputs for batch in micro_batches]
        arguments += [self._without_rows(inputs)] * (self._rounds - len(arguments))
        # The gradients of all micro-batches add up first: no bucket is complete before the last one.
        with recipe.timeline.span("backward"), backward_errors(), self._sync.micro_batch(last=False):
            try:
                self._pipeline.train(arguments, loss, self._collecting, layer_loss)
            finally:
                self._reports = Reports()  # releases the graph
        return results

    def drain(self) -> None:
        with backward_errors():
            self._pipeline.drain()

    def settle(self) -> None:
        # Sums over many rows may round differently in the stages that share a parameter.
        with backward_errors():
            self._pipeline.share_ties()

    def evaluate(self, micro_batch: Batch, *, keeps_outputs: bool) -> list[MicroBatchOutput]:
        with backward_errors(), collect_reports() as reports:
            outputs = self._pipeline.evaluate(micro_batch.inputs, self._autocast)
            self._pipeline.finish()
        if not self._pipeline.has_outputs:
            return [self._make_result(reports)]
        _, result = compute_losses(
            self._recipe, self._sync.network, outputs, micro_batch, reports, keeps_outputs=keeps_outputs
        )
        return [result]

    def evaluate_without_rows(self, inputs: Sequence[torch.Tensor]) -> None:
        if self._rounds:
            with backward_errors():
                self._pipeline.evaluate(self._without_rows(inputs), self._autocast)
                self._pipeline.finish()

    def share(self, values: dict[str, float]) -> dict[str, float]:
        mine = json.dumps(values).encode() if self._pipeline.has_outputs else b""
        found: dict[str, float] = json.loads(gather_bytes(self._axis, mine)[0])
        return found

    def privacy_spent(self) -> PrivacySpent | None:
        return None

    @contextmanager
    def _collecting(self) -> Iterator[None]:
        with self._autocast(), collect_reports() as self._reports:
            yield

    def _make_result(self, reports: Reports) -> MicroBatchOutput:
        losses = torch.zeros(self._recipe.criterion.num_losses, device=self._recipe.device)
        return MicroBatchOutput(losses, 0.0, [], reports.counts)

    def _without_rows(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(values[:0] for values in inputs)


Passes = WholePasses | PipelinedPasses


def _sum_nothing(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns 0 for values without rows; the backward pass still brings other ranks' gradients to experts."""
    return torch.stack([value.float().sum() for value in values]).sum()
