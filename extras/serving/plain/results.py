"""Converts the outputs of a network to the columns that `transform` adds."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringspark.pipelines.rows import NumpyArray


def columns_of(outputs: NumpyArray, results: dict[str, Any]) -> list[tuple[str, Any]]:
    """Returns name and values of each result column, from outputs of shape (rows, width) float64."""
    if results["type"] == "values":
        ends = np.cumsum(results["widths"])[:-1]
        parts = [part[:, 0] if part.shape[1] == 1 else part for part in np.split(outputs, ends, axis=1)]
    else:
        raw = np.concatenate([-outputs, outputs], axis=1) if outputs.shape[1] == 1 else outputs
        likely = probabilities(outputs)
        parts = [raw, likely, decide(outputs, raw, likely, results["thresholds"])]
    named: list[tuple[str, Any]] = list(zip(results["names"], parts, strict=True))
    if results["label_name"]:
        # The number after the last class stands for unknown strings. NaN converts to the smallest integer.
        labels = [*results["labels"], None]
        with np.errstate(invalid="ignore"):
            numbers = parts[-1].astype(np.int64)
        classes = [labels[n] if 0 <= n < len(labels) else None for n in numbers.tolist()]
        named.append((results["label_name"], classes))
    return [(name, values) for name, values in named if name]


def decide(
    outputs: NumpyArray, raw: NumpyArray, likely: NumpyArray, thresholds: list[float] | None
) -> NumpyArray:
    """Returns the class of each row, (rows,) float64; NaN for a row with a NaN."""
    scaled = raw
    if thresholds is not None:
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled = likely / np.asarray(thresholds)
        # As in Spark, 0 / 0 never wins, and the first of equals wins.
        scaled = np.where(np.isnan(scaled), -np.inf, scaled)
    return np.where(np.isnan(outputs).any(axis=1), np.nan, scaled.argmax(axis=1))


def probabilities(outputs: NumpyArray) -> NumpyArray:
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        if outputs.shape[1] > 2:
            exponentials = np.exp(outputs - outputs.max(axis=1, keepdims=True))
            softmax: NumpyArray = exponentials / exponentials.sum(axis=1, keepdims=True)
            return softmax
        margin = outputs[:, :1] if outputs.shape[1] == 1 else outputs[:, 1:] - outputs[:, :1]
        sigmoid: NumpyArray = 1 / (1 + np.exp(np.concatenate([margin, -margin], axis=1)))
        return sigmoid
