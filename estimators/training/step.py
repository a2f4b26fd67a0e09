"""Runs one micro-batch on one rank: forward pass, losses, backward pass.

The trainer calls it, and so does the memory planner on fake tensors, so the planner counts the code that
runs. The only side effect is the gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.base import backward_errors
from ringspark.estimators.parallel.base import GradientSync
from ringspark.estimators.training.compilation import single_rows_eager
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.non_finite import poisoned
from ringspark.estimators.training.objective.criterion import Criterion
from ringspark.estimators.training.objective.sums import MicroBatchOutput
from ringspark.estimators.training.observation.timeline import NO_TIMELINE, Timeline
from ringspark.estimators.training.precision import LossScaler, autocast
from ringspark.estimators.training.saved_tensors.hooks import saved_tensor_hooks
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.models.outputs import as_outputs
from ringspark.models.reports import Reports, collect_reports


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The inputs of a pass beside the network and its rows, equal for all micro-batches of a training."""

    config: TrainConfig
    criterion: Criterion
    scaler: LossScaler
    device: torch.device
    timeline: Timeline = NO_TIMELINE


def forward_backward(
    recipe: Recipe, sync: GradientSync, batch: Batch, divisor: torch.Tensor | float, *, keeps_outputs: bool
) -> MicroBatchOutput:
    """Adds to the gradients those of these rows' share of the global mean loss.

    Args:
        batch: One micro-batch of at least one row.
        divisor: See `global_weights`.
        keeps_outputs: Whether outputs and labels are kept for metrics.
    """
    timeline = recipe.timeline
    with timeline.span("forward"):
        losses, seen = forward(recipe, sync.module, sync.network, batch, keeps_outputs=keeps_outputs)
        loss = scaled(recipe, sync, losses, divisor)
    eager = single_rows_eager(recipe.config.compile, batch.num_rows)
    # Recomputed modules run again in here.
    with timeline.span("backward"), eager, backward_errors():
        loss.backward()  # type: ignore[no-untyped-call]
    return seen


def scaled(
    recipe: Recipe, sync: GradientSync, losses: torch.Tensor, divisor: torch.Tensor | float
) -> torch.Tensor:
    """Returns what is differentiated: the rows' share of the global mean loss, times all factors."""
    loss = recipe.criterion.total(losses / divisor)
    if recipe.config.on_non_finite != "stop":
        loss = poisoned(loss)
    return recipe.scaler.scale(loss if sync.loss_factor == 1 else loss * sync.loss_factor)


def forward(
    recipe: Recipe, module: nn.Module, network: nn.Module, batch: Batch, *, keeps_outputs: bool
) -> tuple[torch.Tensor, MicroBatchOutput]:
    """Returns each head's weighted loss summed over the rows, (num_heads,), and what the history needs.

    In training the first has in it what layers have added to the loss (`models.reports`), and the second has
    not: losses of the history are those of the outputs.

    Args:
        module: The module to call: the network, or its wrapper that exchanges gradients.

    Raises:
        ValueError: The network returns more or fewer outputs than there are labels, or one of its layers
            adds a loss that is not one value per row.
    """
    config = recipe.config
    hooks = saved_tensor_hooks(
        offload=config.activation_offload,
        compression=config.activation_compression,
        module=network,
        device=recipe.device,
    )
    # Sharded parameters are gathered in here, which fails if a peer is lost.
    eager = single_rows_eager(config.compile, batch.num_rows)
    computing = autocast(config.precision, recipe.device)
    with computing, hooks, eager, backward_errors(), collect_reports() as reports:
        outputs = module(*batch.inputs)
    return judged(recipe, network, outputs, batch, reports, keeps_outputs=keeps_outputs)


def judged(
    recipe: Recipe,
    network: nn.Module,
    returned: Any,
    batch: Batch,
    reports: Reports | None = None,
    *,
    keeps_outputs: bool,
) -> tuple[torch.Tensor, MicroBatchOutput]:
    """Returns what `forward` does, from what the network returned for a micro-batch.

    Args:
        reports: What its layers have added; None where they add nothing.
    """
    config, criterion = recipe.config, recipe.criterion
    reports = reports or Reports()
    outputs = as_outputs(returned)
    if len(outputs) != criterion.num_losses:
        mode = "train" if network.training else "validation"
        raise ValueError(
            f"model {type(network).__name__} returns {len(outputs)} tensors in {mode} mode for "
            f"{criterion.num_losses} labels; return the same outputs in training as in evaluation"
        )
    # fp32 outside autocast: a mean over many rows would lose digits in 16 bits.
    outputs = tuple(output.float() for output in outputs)
    rows = criterion.rows(outputs, batch.labels)
    if batch.weight is not None:
        rows = rows * batch.weight[:, None]
    losses = rows.sum(0)
    pairs = []
    if keeps_outputs:
        # A CUDA graph writes its outputs anew in every pass, and metrics may hold them for longer.
        own = torch.clone if config.compile and recipe.device.type == "cuda" else torch.Tensor.detach
        whole = criterion.gather_classes(outputs)
        pairs = [(own(output.detach()), label) for output, label in zip(whole, batch.labels, strict=True)]
    seen = MicroBatchOutput(losses.detach(), _own_weights(recipe, batch), pairs, reports.counts)
    if reports.losses:
        losses = losses + of_layers(recipe, reports, batch)
    return losses, seen


def of_layers(recipe: Recipe, reports: Reports, batch: Batch) -> torch.Tensor:
    """Returns what layers add to each head's weighted loss summed over the rows, (num_heads,).

    Raises:
        ValueError: A layer adds a loss that is not one value per row.
    """
    return recipe.criterion.sum_layer_losses(_of_rows(reports, batch), batch.labels, batch.weight)


def _of_rows(reports: Reports, batch: Batch) -> torch.Tensor:
    """Returns the sum of the losses that layers have added, (rows,)."""
    for values in reports.losses:
        if values.shape != (batch.num_rows,):
            raise ValueError(
                f"a layer may add a loss of shape ({batch.num_rows},), one value per row, got "
                f"{tuple(values.shape)}; give add_loss the mean of each row"
            )
    return torch.stack([values.float() for values in reports.losses]).sum(0)


def global_weights(
    recipe: Recipe, batch: Batch, global_rows: int, together: Collective | None
) -> torch.Tensor | float:
    """Returns the weight of all ranks' rows, which divides the losses. Runs on every rank.

    Args:
        batch: All of this rank's rows of the step.
        global_rows: Rows of all ranks; without row weights they are the divisor.
        together: Collective of the ranks that share the global batch, if they take the step together. If not,
            a row of another rank is taken to weigh as much as this rank's rows do on average.

    Returns:
        One number for all losses if rows have no weights, else one for each, (num_heads,).
    """
    weights = _own_weights(recipe, batch)
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


def _own_weights(recipe: Recipe, batch: Batch) -> torch.Tensor | float:
    """Returns the weight of these rows in the mean of each head's loss, like `global_weights`."""
    weights = recipe.criterion.row_weights(batch.labels)
    if weights is None:
        if batch.weight is None:
            return float(batch.num_rows)
        return batch.weight.sum().expand(recipe.criterion.num_losses).contiguous()
    return (weights if batch.weight is None else weights * batch.weight[:, None]).sum(0)
