"""Forward and backward passes of a step over this rank's stages of a pipeline."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ringspark.estimators.collectives.base import backward_errors, gather_bytes
from ringspark.estimators.parallel.base import GradientSync
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.objective.sums import MicroBatchOutput
from ringspark.estimators.training.passes import Divisor, Inputs, Passes
from ringspark.estimators.training.precision import autocast
from ringspark.estimators.training.step import Recipe, compute_losses, scale_loss, sum_layer_losses
from ringspark.extras.model_parallel.pipeline.passes import PipelinePasses
from ringspark.models.outputs import as_outputs
from ringspark.models.reports import Reports, collect_reports


class PipelinedPasses(Passes):
    """Passes of a rank with some pipeline stages; the rank with the last layers has the losses."""

    def __init__(self, pipeline: PipelinePasses, recipe: Recipe, sync: GradientSync, mesh: RankMesh) -> None:
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
        self, micro_batches: Sequence[Batch], divisor: Divisor, *, inputs: Inputs, keeps_outputs: bool
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
        if not self._pipeline.has_outputs:
            return [self._make_result(reports)]
        _, result = compute_losses(
            self._recipe, self._sync.network, outputs, micro_batch, reports, keeps_outputs=keeps_outputs
        )
        return [result]

    def evaluate_without_rows(self, inputs: Inputs) -> None:
        if self._rounds:
            with backward_errors():
                self._pipeline.evaluate(self._without_rows(inputs), self._autocast)

    def share(self, values: dict[str, float]) -> dict[str, float]:
        mine = json.dumps(values).encode() if self._pipeline.has_outputs else b""
        found: dict[str, float] = json.loads(gather_bytes(self._axis, mine)[0])
        return found

    @contextmanager
    def _collecting(self) -> Iterator[None]:
        with self._autocast(), collect_reports() as self._reports:
            yield

    def _make_result(self, reports: Reports) -> MicroBatchOutput:
        losses = torch.zeros(self._recipe.criterion.num_losses, device=self._recipe.device)
        return MicroBatchOutput(losses, 0.0, [], reports.counts)

    def _without_rows(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(values[:0] for values in inputs)


def _sum_nothing(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns 0 for values without rows; the backward pass still brings other ranks' gradients to experts."""
    return torch.stack([value.float().sum() for value in values]).sum()
