"""Makes the heads of a training from its settings, its data and the outputs of its network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ringspark.estimators.training.objective.heads import Head
from ringspark.estimators.training.objective.losses import (
    ClassLoss,
    MemberLoss,
    RowLoss,
    default_loss,
    resolve_loss,
)
from ringspark.estimators.training.objective.own_metrics import get_task
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.pipelines import ShardManifest


def set_outputs(config: TrainConfig, widths: Sequence[int]) -> TrainConfig:
    """Returns the config with the output widths, and with the actual loss in place of each "auto"."""
    losses = tuple(
        default_loss(config.task, width) if name == "auto" else name
        for name, width in zip(config.losses, widths, strict=True)
    )
    return config.with_values(losses=losses, output_widths=tuple(widths))


def make_heads(
    config: TrainConfig, objects: UserObjects, manifest: ShardManifest | None = None
) -> tuple[Head, ...]:
    """Returns the heads, in the order of the labels; raises ValueError if a metric fits no label."""
    per_row = {metric.name: metric.per_row for metric in config.own_metrics}
    own = {name: (metric, per_row.get(name, False)) for name, metric in objects.metrics.items()}
    heads = []
    for index, (label, weight) in enumerate(zip(config.label_columns, config.loss_weights, strict=True)):
        loss = objects.loss(config, index)
        quantiles = config.quantiles or ()
        head = Head(label=label, loss=loss, weight=weight, own_metrics=own, quantiles=quantiles)
        heads.append(replace(head, metrics=_select_metrics(head, config, objects.metrics)))
    for name in config.metrics:
        if not any(name in head.metrics for head in heads):
            task = get_task(objects.metrics.get(name, name))
            raise ValueError(
                f"the metric {name!r} is for {task} and fits none of the losses {list(config.losses)}; "
                f"drop it from metrics, or set a loss for {task}"
            )
    return settle_heads(heads, config, objects, manifest)


def settle_heads(
    heads: Sequence[Head], config: TrainConfig, objects: UserObjects, manifest: ShardManifest | None
) -> tuple[Head, ...]:
    """Returns the heads with the loss, the width and the ignored label of `config` and `manifest`."""
    settled = []
    for index, (head, width) in enumerate(zip(heads, config.output_widths or (1,) * len(heads), strict=True)):
        loss = objects.loss(config, index)
        ignored = None
        if manifest is not None:
            ignored = find_ignored_label(resolve_loss(loss), manifest.range_of(head.label))
        settled.append(replace(head, loss=loss, width=width, ignored=ignored))
    return tuple(settled)


def _select_metrics(head: Head, config: TrainConfig, own: Mapping[str, Any]) -> tuple[str, ...]:
    task = config.task
    if task == "any" and isinstance(head.loss, str | nn.Module):
        task = "classification" if head.takes_classes else "regression"
    if task == "any":
        return config.metrics
    return tuple(name for name in config.metrics if get_task(own.get(name, name)) in (None, task))


def find_ignored_label(loss: RowLoss, label_range: tuple[float, float] | None = None) -> int | None:
    """Returns the class number of rows that the loss and metrics ignore, or None."""
    inner = loss.member if isinstance(loss, MemberLoss) else loss
    if not isinstance(inner, ClassLoss):
        return None
    if label_range is not None and not label_range[0] <= inner.ignored <= label_range[1]:
        return None
    return inner.ignored
