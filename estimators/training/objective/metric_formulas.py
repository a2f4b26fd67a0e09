"""Computes metrics for which torchmetrics is not exact or waits for the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from math import nan
from typing import Any

import torch
from torch.nn import functional

from ringspark.estimators.training.objective.deviance import half_deviance

Curve = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def class_counts(predicted: torch.Tensor, label: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Returns three counts of rows per class, (3, classes): correctly predicted, predicted, and labelled."""
    # torchmetrics counts by bincount, which waits for the device to learn its size.
    counts = torch.zeros((3, num_classes), dtype=torch.int64, device=label.device)
    ones = torch.ones_like(label)
    counts[0].index_add_(0, label, (predicted == label).long())
    counts[1].index_add_(0, predicted, ones)
    counts[2].index_add_(0, label, ones)
    return counts


def add_counts(metric: Any, counts: torch.Tensor) -> None:
    """Adds a result of `class_counts` to a metric."""
    right, predicted, actual = counts
    rest = actual.sum() - predicted - actual + right
    for key, value in {"tp": right, "fp": predicted - right, "fn": actual - right, "tn": rest}.items():
        state = getattr(metric, key)  # (classes,), or (1,): class 1 if binary, the sum if micro
        if len(state) == 1:
            is_binary = type(metric).__name__.startswith("Binary")
            value = value[1:2] if is_binary else value.sum(0, keepdim=True)
        setattr(metric, key, state + value)


def balanced_accuracy(metric: Any) -> torch.Tensor:
    """Returns the mean recall of the classes that occur, like scikit-learn."""
    right, missed = metric.tp.double(), metric.fn.double()
    occurs = right + missed > 0
    recalls: torch.Tensor = right[occurs] / (right + missed)[occurs]
    return recalls.mean()


def auroc(scores: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
    """Returns the share of correctly ordered pairs, with ties as half: Mann and Whitney's U."""
    order = scores.argsort()
    _, places, counts = torch.unique_consecutive(scores[order], return_inverse=True, return_counts=True)
    ranks = counts.cumsum(0).double() - (counts - 1).double() / 2
    num_positives = positive.sum().double()
    below = ranks[places][positive[order]].sum() - num_positives * (num_positives + 1) / 2
    share: torch.Tensor = below / num_positives / (len(scores) - num_positives)
    return share


def average_precision(scores: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
    """Returns the sum over distinct scores of precision times gain in recall."""
    order = scores.argsort(descending=True)
    _, counts = torch.unique_consecutive(scores[order], return_counts=True)
    ends = counts.cumsum(0)  # rows down to each distinct score
    hits = positive[order].cumsum(0)[ends - 1]
    gains = torch.diff(hits, prepend=hits.new_zeros(1))
    area: torch.Tensor = (hits.double() / ends * gains).sum() / positive.sum()
    return area


def curve_mean(metric: Any, curve: Curve, needs_negatives: bool) -> torch.Tensor:
    """Returns the mean of `curve` over all classes for which the curve is defined; NaN if there are none.

    A curve needs rows of the class, and also rows of other classes if `needs_negatives`. torchmetrics is
    exact only up to 16.7 million positives, and scores a class without rows as 0.
    """
    scores, label = torch.cat(metric.preds), torch.cat(metric.target)
    columns = [(1, scores)] if scores.dim() == 1 else list(enumerate(scores.unbind(1)))
    values = []
    for number, column in columns:
        positive = label == number
        if positive.any() and not (needs_negatives and positive.all()):
            values.append(curve(column, positive))
    return torch.stack(values).mean() if values else torch.tensor(nan)


class Formula:
    """A metric with the part of torchmetrics' protocol that `MetricSet` calls.

    Attributes:
        metric_state: The states by name: a tensor that is summed over rows, or a list of tensors.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.metric_state: dict[str, Any] = {}

    def merge_state(self, other: Mapping[str, Any]) -> None:
        """Adds the rows of another `metric_state`."""
        own = self.metric_state
        self.metric_state = {k: v + own[k] if own else v for k, v in other.items()} or own

    def load_state(self, other: Mapping[str, Any]) -> None:
        """Replaces the rows by another `metric_state`."""
        self.reset()
        self.merge_state(other)


class Temperature(Formula):
    """The divisor of the logits with the smallest log loss.

    It sums the log losses of a grid of divisors, from 1/8 to 8, and fits a parabola around the smallest.
    """

    def __init__(self) -> None:
        super().__init__()
        self._logs = torch.linspace(-3, 3, 61, dtype=torch.float64) * math.log(2)

    def update(self, logits: torch.Tensor, label: torch.Tensor) -> None:
        sums = [
            functional.cross_entropy(logits / divisor, label, reduction="sum")
            for divisor in self._logs.exp().tolist()
        ]
        self.merge_state({"log_losses": torch.stack(sums)})

    def compute(self) -> torch.Tensor:
        losses = self.metric_state["log_losses"].double().cpu()
        if not losses.isfinite().all():
            return torch.tensor(nan)
        best, step, shift = int(losses.argmin()), float(self._logs[1] - self._logs[0]), 0.0
        if 0 < best < len(losses) - 1:
            before, at, after = losses[best - 1 : best + 2].tolist()
            # Flat losses, such as those of equal logits, have no curvature.
            shift = (before - after) / (2 * max(before - 2 * at + after, 1e-300))
        return (self._logs[best] + step * max(-0.5, min(0.5, shift))).exp()


class MeanDeviance(Formula):
    """Mean of the unit deviances; see `deviance.py`."""

    def __init__(self, power: float) -> None:
        super().__init__()
        self._power = power

    def update(self, values: torch.Tensor, label: torch.Tensor) -> None:
        found = 2 * half_deviance(values, label, self._power)
        self.merge_state({"sum": found.sum(), "count": torch.full_like(found.sum(), found.numel())})

    def compute(self) -> torch.Tensor:
        mean: torch.Tensor = self.metric_state["sum"] / self.metric_state["count"]
        return mean


class R2(Formula):
    """Coefficient of determination, averaged over the outputs.

    Merges means and squared deviations (Chan, Golub and LeVeque 1979); the sums of squares of torchmetrics
    lose all digits for targets far from zero. Constant targets score 0, or 1 if predicted exactly, as in
    scikit-learn.
    """

    def update(self, values: torch.Tensor, label: torch.Tensor) -> None:
        values, label = values.reshape(len(values), -1), label.reshape(len(label), -1)  # (batch, outputs)
        mean = label.mean(0)
        self.merge_state(
            {
                "rows": torch.full_like(mean, len(label)),
                "mean": mean,
                "deviation": ((label - mean) ** 2).sum(0),
                "residual": ((label - values) ** 2).sum(0),
            }
        )

    def merge_state(self, other: Mapping[str, Any]) -> None:
        own = self.metric_state
        if not own or not other:
            self.metric_state = own or dict(other)
            return
        rows = own["rows"] + other["rows"]
        shift = other["mean"] - own["mean"]
        between = shift**2 * own["rows"] * other["rows"] / rows
        self.metric_state = {
            "rows": rows,
            "mean": own["mean"] + shift * other["rows"] / rows,
            "deviation": own["deviation"] + other["deviation"] + between,
            "residual": own["residual"] + other["residual"],
        }

    def compute(self) -> torch.Tensor:
        deviation, residual = self.metric_state["deviation"], self.metric_state["residual"]
        if self.metric_state["rows"][0] < 2:
            return torch.tensor(nan)
        constant = (residual == 0).to(residual.dtype)
        return torch.where(deviation > 0, 1 - residual / deviation, constant).mean()
