"""The label, the loss and the metrics of each output of the network, as one value per output.

Heads are built once from the settings and the data. The driver's check, the criterion, the sums of an epoch
and the identity of a run read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ringspark.estimators.training.objective.losses import (
    ClassLoss,
    MemberLoss,
    RowLoss,
    default_loss,
    resolve_loss,
)
from ringspark.estimators.training.objective.own_metrics import task_of
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.pipelines import ShardManifest

Loss = str | Callable[..., torch.Tensor]

_CLASS_LOSSES = ("CrossEntropyLoss", "NLLLoss", "BCEWithLogitsLoss", "MultiMarginLoss")


@dataclass(frozen=True, kw_only=True)
class Head:
    """One output of the network.

    Attributes:
        label: Column of the label.
        loss: Name of the loss, or the user's own `nn` loss or callable; see `losses.resolve_loss`.
        weight: Factor of this loss in the sum of all losses.
        width: Size of the output's last dimension, 1 if it has none.
        metrics: Names of the metrics that suit the label.
        own_metrics: The user's own metrics, see `MetricSet`; some may not suit the label.
        ignored: Class number of rows that count neither in the loss nor in metrics; None if no row of the
            data has it, or the loss ignores none.
    """

    label: str
    loss: Loss
    weight: float = 1.0
    width: int = 1
    metrics: tuple[str, ...] = ()
    own_metrics: Mapping[str, tuple[Any, bool]] = field(default_factory=dict)
    ignored: int | None = None

    @property
    def loss_name(self) -> str:
        """The name of the loss in messages."""
        kind = type(self.loss).__name__
        return self.loss if isinstance(self.loss, str) else getattr(self.loss, "__name__", kind)

    @property
    def is_per_member(self) -> bool:
        """Whether the output in training mode holds each ensemble member's values, not a prediction."""
        return isinstance(self.loss, str) and self.loss.endswith("_per_member")

    @property
    def takes_classes(self) -> bool:
        """Whether the loss compares logits with class numbers."""
        if isinstance(self.loss, str):
            return self.loss.startswith(("cross_entropy", "bce_with_logits")) or self.loss in _CLASS_LOSSES
        return type(self.loss).__name__ in _CLASS_LOSSES


def with_outputs(config: TrainConfig, widths: Sequence[int]) -> TrainConfig:
    """Returns the config with the widths of the network's outputs, and with names for losses "auto"."""
    losses = tuple(
        default_loss(config.task, width) if name == "auto" else name
        for name, width in zip(config.losses, widths, strict=True)
    )
    return replace(config, losses=losses, output_widths=tuple(widths))


def make_heads(
    config: TrainConfig, objects: UserObjects, manifest: ShardManifest | None = None
) -> tuple[Head, ...]:
    """Returns the heads, in the order of the labels.

    Args:
        config: Result of `with_outputs`; the memory planner's has no widths, and each counts as 1.
        manifest: Holds the range of the labels. Without it, no row counts as ignored.

    Raises:
        ValueError: A metric suits no label.
    """
    widths = config.output_widths or (1,) * len(config.label_columns)
    settings = zip(config.label_columns, config.loss_weights, widths, strict=True)
    per_row = {metric.name: metric.per_row for metric in config.own_metrics}
    own = {name: (metric, per_row.get(name, False)) for name, metric in objects.metrics.items()}
    heads = []
    for index, (label, weight, width) in enumerate(settings):
        head = Head(label=label, loss=objects.loss(config, index), weight=weight, width=width)
        ignored = None
        if manifest is not None:
            ignored = ignored_label(resolve_loss(head.loss), manifest.range_of(label))
        metrics = _metrics_of(head, config, objects.metrics)
        heads.append(replace(head, metrics=metrics, own_metrics=own, ignored=ignored))
    for name in config.metrics:
        if not any(name in head.metrics for head in heads):
            task = task_of(objects.metrics.get(name, name))
            raise ValueError(
                f"metrics {name!r} is of a {task} and suits none of the losses "
                f"{list(config.losses)}; drop it or set loss"
            )
    return tuple(heads)


def _metrics_of(head: Head, config: TrainConfig, own: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the metrics of classes if the loss takes classes, else those of values; all for a callable."""
    task = config.task
    if task == "any" and isinstance(head.loss, str | nn.Module):
        task = "classification" if head.takes_classes else "regression"
    if task == "any":
        return config.metrics
    return tuple(name for name in config.metrics if task_of(own.get(name, name)) in (None, task))


def ignored_label(loss: RowLoss, label_range: tuple[float, float] | None = None) -> int | None:
    """Returns the class number of rows that a loss ignores, and metrics must too; None if there is none.

    Args:
        label_range: Smallest and largest label of all rows, if known; a number outside of it is no row's.
    """
    inner = loss.member if isinstance(loss, MemberLoss) else loss
    if not isinstance(inner, ClassLoss):
        return None
    if label_range is not None and not label_range[0] <= inner.ignored <= label_range[1]:
        return None
    return inner.ignored
