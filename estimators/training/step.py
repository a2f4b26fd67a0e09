"""Runs one micro-batch on one rank: forward pass, losses, backward pass.

The memory planner calls the same code on fake tensors, so it counts what a training runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.base import backward_errors
from ringspark.estimators.parallel.base import GradientSync
from ringspark.estimators.techniques import Technique, techniques_of
from ringspark.estimators.training.compilation import skip_single_rows
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.non_finite import poison
from ringspark.estimators.training.objective.criterion import Criterion
from ringspark.estimators.training.objective.sums import MicroBatchOutput
from ringspark.estimators.training.observation.timeline import NO_TIMELINE, Timeline
from ringspark.estimators.training.precision import LossScaler, autocast
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.models.outputs import as_outputs
from ringspark.models.reports import Reports, collect_reports


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a pass needs besides the network and the batch."""

    config: TrainConfig
    criterion: Criterion
    scaler: LossScaler
    device: torch.device
    timeline: Timeline = NO_TIMELINE

    @cached_property
    def techniques(self) -> Sequence[Technique]:
        return techniques_of(self.config)


def forward_backward(
    recipe: Recipe, sync: GradientSync, batch: Batch, divisor: torch.Tensor | float, *, keeps_outputs: bool
) -> MicroBatchOutput:
    """Computes the loss of one micro-batch, divided by `divisor`, and accumulates its gradients."""
    timeline = recipe.timeline
    with timeline.span("forward"):
        losses, result = forward(recipe, sync.module, sync.network, batch, keeps_outputs=keeps_outputs)
        loss = scale_loss(recipe, sync, losses, divisor)
    eager = skip_single_rows(recipe.config.compile, batch.num_rows)
    # Recomputed modules run again in here.
    with timeline.span("backward"), eager, backward_errors(), recipe.criterion.differentiable():
        loss.backward()  # type: ignore[no-untyped-call]
    return result


def scale_loss(
    recipe: Recipe, sync: GradientSync, losses: torch.Tensor, divisor: torch.Tensor | float
) -> torch.Tensor:
    """Returns the weighted sum of `losses` / `divisor`, times `sync.loss_factor` and the loss scale."""
    loss = recipe.criterion.total(losses / divisor)
    if recipe.config.on_non_finite != "stop":
        loss = poison(loss)
    return recipe.scaler.scale(loss if sync.loss_factor == 1 else loss * sync.loss_factor)


def forward(
    recipe: Recipe, module: nn.Module, network: nn.Module, batch: Batch, *, keeps_outputs: bool
) -> tuple[torch.Tensor, MicroBatchOutput]:
    """Returns each head's weighted loss summed over the rows, (num_heads,), and the output for the history.

    The summed losses include the losses that layers add by `add_loss`. The output for the history does not.
    """
    config = recipe.config
    # Sharded parameters are gathered in here, which fails if a peer is lost.
    eager = skip_single_rows(config.compile, batch.num_rows)
    computing = autocast(config.precision, recipe.device)
    if recipe.criterion.sees_network:
        inputs = (v.detach().requires_grad_(v.is_floating_point()) for v in batch.inputs)
        batch = replace(batch, inputs=tuple(inputs))
    with recipe.criterion.differentiable():
        with ExitStack() as around, computing, eager, backward_errors(), collect_reports() as reports:
            for technique in recipe.techniques:
                around.enter_context(technique.around_forward(config, network, recipe.device))
            outputs = module(*batch.inputs)
        return compute_losses(recipe, network, outputs, batch, reports, keeps_outputs=keeps_outputs)


def compute_losses(
    recipe: Recipe,
    network: nn.Module,
    returned: Any,
    batch: Batch,
    reports: Reports | None = None,
    *,
    keeps_outputs: bool,
) -> tuple[torch.Tensor, MicroBatchOutput]:
    config, criterion = recipe.config, recipe.criterion
    reports = reports or Reports()
    outputs = as_outputs(returned)
    if len(outputs) != criterion.num_losses:
        mode = "train" if network.training else "validation"
        raise ValueError(
            f"model {type(network).__name__} returns {len(outputs)} tensors in {mode} mode for "
            f"{criterion.num_losses} labels; return the same outputs in training as in evaluation"
        )
    # fp32 outside autocast, because a mean over many rows would lose digits in 16 bits.
    outputs = tuple(output.float() for output in outputs)
    with ExitStack() as around:
        for technique in recipe.techniques:
            around.enter_context(technique.around_losses(config, network, recipe.device))
        rows = criterion.rows(outputs, batch.labels, network, batch.inputs)
    if batch.soft_labels is not None and network.training:
        weights = criterion.row_weights(batch.labels)
        for technique in recipe.techniques:
            rows = technique.mix_losses(config, rows, outputs[0], batch.soft_labels, weights)
    if batch.weight is not None:
        rows = rows * batch.weight[:, None]
    losses = rows.sum(0)
    pairs = []
    if keeps_outputs:
        # A CUDA graph overwrites its outputs in every pass, and metrics may hold them for longer.
        own = torch.clone if config.compile and recipe.device.type == "cuda" else torch.Tensor.detach
        whole = criterion.gather_classes(outputs)
        pairs = [(own(output.detach()), label) for output, label in zip(whole, batch.labels, strict=True)]
    result = MicroBatchOutput(losses.detach(), _sum_weights(recipe, batch), pairs, reports.counts)
    if reports.losses:
        losses = losses + sum_layer_losses(recipe, reports, batch)
    return losses, result


def sum_layer_losses(recipe: Recipe, reports: Reports, batch: Batch) -> torch.Tensor:
    """Returns the layers' losses of `add_loss`, summed over the rows for each head, (num_heads,)."""
    for values in reports.losses:
        if values.shape != (batch.num_rows,):
            raise ValueError(
                f"add_loss needs a loss of shape ({batch.num_rows},), one value per row, got "
                f"{tuple(values.shape)}; give add_loss the mean of each row"
            )
    total = torch.stack([values.float() for values in reports.losses]).sum(0)  # (rows,)
    return recipe.criterion.sum_layer_losses(total, batch.labels, batch.weight)


def global_weights(
    recipe: Recipe, batch: Batch, global_rows: int, together: Collective | None
) -> torch.Tensor | float:
    """Returns the total weight of all ranks' rows, which divides the losses. Runs on every rank.

    Without row weights, returns `global_rows`; with row weights, one total per loss, (num_heads,). If
    `together` is None, the other ranks' rows are assumed to have the mean weight of this rank's rows.
    """
    weights = _sum_weights(recipe, batch)
    if not isinstance(weights, torch.Tensor):
        return float(global_rows)
    if together is None:
        total = weights * (global_rows / max(1, batch.num_rows))
    else:
        total = weights.clone()
        with recipe.timeline.span("exchange"):
            together.start_sum(total, "weights")()
    # If all rows of the batch have weight 0, every loss is zero and must not become NaN.
    return torch.where(total > 0, total, torch.ones_like(total))


def _sum_weights(recipe: Recipe, batch: Batch) -> torch.Tensor | float:
    weights = recipe.criterion.row_weights(batch.labels)
    if weights is None:
        if batch.weight is None:
            return float(batch.num_rows)
        return batch.weight.sum().expand(recipe.criterion.num_losses).contiguous()
    return (weights if batch.weight is None else weights * batch.weight[:, None]).sum(0)
