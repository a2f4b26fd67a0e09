"""Turns logits into scores, probabilities and classes, in NumPy. Served models have a copy of this file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def raw_scores(logits: Array) -> Array:
    """Returns (rows, classes) from (rows, width). A single logit z makes the scores (-z, z)."""
    return np.concatenate([-logits, logits], axis=1) if logits.shape[1] == 1 else logits


def probabilities(logits: Array) -> Array:
    """Returns (rows, classes) from (rows, width)."""
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        if logits.shape[1] > 2:
            exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
            softmax: Array = exponentials / exponentials.sum(axis=1, keepdims=True)
            return softmax
        # This form of the softmax of two never overflows.
        margin = logits[:, :1] if logits.shape[1] == 1 else logits[:, 1:] - logits[:, :1]
        sigmoid: Array = 1 / (1 + np.exp(np.concatenate([margin, -margin], axis=1)))
        return sigmoid


def decide(logits: Array, thresholds: Sequence[float] | None) -> Array:
    """Returns the predicted class of each row, (rows,) float64; NaN for a row with a NaN."""
    scaled = raw_scores(logits)
    if thresholds is not None:
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled = probabilities(logits) / np.asarray(thresholds)
        # As in Spark, 0 / 0 never wins, anything else / 0 always wins, and the first of equals wins.
        scaled = np.where(np.isnan(scaled), -np.inf, scaled)
    return np.where(np.isnan(logits).any(axis=1), np.nan, scaled.argmax(axis=1))


def name_classes(classes: Array, names: Sequence[str]) -> list[str | None]:
    """Returns the name of each class; None for NaN, and for the number after the last, of unknown names."""
    numbers = np.nan_to_num(classes, nan=-1).astype(np.int64)
    return [names[n] if 0 <= n < len(names) else None for n in numbers.tolist()]
