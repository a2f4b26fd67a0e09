"""The label, the loss and the metrics of one output of the network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Loss = str | Callable[..., torch.Tensor]

_CLASS_LOSSES = ("CrossEntropyLoss", "NLLLoss", "BCEWithLogitsLoss", "MultiMarginLoss")


@dataclass(frozen=True, kw_only=True)
class Head:
    """One output of the network.

    Attributes:
        label: Label column.
        loss: See `losses.resolve_loss`.
        weight: Factor of this loss in the sum of all losses.
        width: Size of the output's last dimension, 1 if it has none.
        metrics: Names of the metrics that fit the label.
        own_metrics: The user's own metrics, see `MetricSet`.
        ignored: Class number of rows that count neither in the loss nor in metrics; None if there are none.
        quantiles: Probabilities of the quantiles that the output holds; empty if it holds none.
    """

    label: str
    loss: Loss
    weight: float = 1.0
    width: int = 1
    metrics: tuple[str, ...] = ()
    own_metrics: Mapping[str, tuple[Any, bool]] = field(default_factory=dict)
    ignored: int | None = None
    quantiles: tuple[float, ...] = ()

    @property
    def loss_name(self) -> str:
        kind = type(self.loss).__name__
        return self.loss if isinstance(self.loss, str) else getattr(self.loss, "__name__", kind)

    @property
    def is_per_member(self) -> bool:
        """Whether the output in training mode holds each ensemble member's values."""
        return isinstance(self.loss, str) and self.loss.endswith("_per_member")

    @property
    def takes_classes(self) -> bool:
        """Whether the loss compares logits with class numbers."""
        if isinstance(self.loss, str):
            return self.loss.startswith(("cross_entropy", "bce_with_logits")) or self.loss in _CLASS_LOSSES
        return type(self.loss).__name__ in _CLASS_LOSSES
