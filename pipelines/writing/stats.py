"""Gathers the statistics of the columns batch by batch, in the one pass that writes the data.

The driver merges them and stores them in the manifest, so the files and the manifest cannot drift apart.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from ringspark.pipelines.column_stats import ColumnStats

NumpyArray = npt.NDArray[Any]

# Number of elements summed at a time: small enough for the processor's cache and for small rounding errors.
_BLOCK = 1 << 16


class StatsCollector:
    """Gathers the statistics of one column, batch by batch. Runs in a task that writes."""

    def __init__(self, *, is_scalar: bool) -> None:
        self._is_scalar = is_scalar
        self._stats = ColumnStats()

    def add(self, rows: int, numbers: NumpyArray) -> None:
        """Takes the numbers of `rows` rows."""
        counts, finite = _measure(numbers)
        if self._is_scalar and finite.dtype.kind == "f":
            counts["fractional"] = int(np.count_nonzero(finite != np.rint(finite)))
        self._stats = self._stats.merge(ColumnStats(rows=rows, values=len(numbers), **counts))

    def result(self) -> ColumnStats:
        """Returns the statistics so far."""
        return self._stats


def _measure(numbers: NumpyArray) -> tuple[dict[str, Any], NumpyArray]:
    """Returns counts and moments of the numbers, and the finite ones among them."""
    if len(numbers) == 0:
        return {}, numbers
    low, high = numbers.min(), numbers.max()
    counts: dict[str, Any] = {}
    if numbers.dtype.kind == "f" and not (math.isfinite(low) and math.isfinite(high)):
        # A NaN makes both NaN. This is rare, so only now is every element looked at.
        counts = {"nans": int(np.isnan(numbers).sum()), "infs": int(np.isinf(numbers).sum())}
        numbers = numbers[np.isfinite(numbers)]
        if len(numbers) == 0:
            return counts, numbers
        low, high = numbers.min(), numbers.max()
    exact = float if numbers.dtype.kind == "f" else int
    mean, deviations = _moments(numbers)
    return {
        **counts,
        "minimum": exact(low),
        "maximum": exact(high),
        "mean": mean,
        "deviations": deviations,
    }, numbers


def _moments(numbers: NumpyArray) -> tuple[float, float]:
    """Returns the mean and the sum of squared deviations, in float64."""
    count, mean, deviations = 0, 0.0, 0.0
    # Squares of doubles beyond 1e150 overflow; such columns silently get an infinite deviation.
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(numbers), _BLOCK):
            block = numbers[start : start + _BLOCK].astype(np.float64)
            block_mean = float(block.mean())
            block -= block_mean
            share = len(block) / (count + len(block))
            gap = block_mean - mean
            deviations += float(block @ block) + gap * gap * count * share
            mean += gap * share
            count += len(block)
    return mean, deviations
