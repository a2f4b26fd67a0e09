"""Converts a regressor's outputs to columns, in NumPy. Served models have a copy of this file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def central(quantiles: Sequence[float]) -> int:
    """Returns the index of the quantile nearest to the median; of two, the lower one; 0 without any."""
    return min(range(len(quantiles)), key=lambda index: abs(quantiles[index] - 0.5), default=0)


def find_bounds(quantiles: Sequence[float], coverage: float) -> tuple[int, int]:
    """Returns the indices of the quantiles (1 ± coverage) / 2, or the central one twice if one is missing."""
    sides = (1 - coverage) / 2, (1 + coverage) / 2
    found = [i for side in sides for i, quantile in enumerate(quantiles) if abs(quantile - side) < 1e-9]
    return (found[0], found[1]) if len(found) == 2 else (central(quantiles), central(quantiles))


def quantile_columns(
    outputs: Array, quantiles: Sequence[float], coverage: float | None, correction: float
) -> list[Array]:
    """Returns the prediction, (rows,); the quantiles, if any; and both ends of the intervals, if any.

    Args:
        outputs: (rows, quantiles), or (rows, 1) without quantiles.
        coverage: Share of the labels that the intervals cover; None: no intervals.
        correction: Added to the upper and subtracted from the lower end.
    """
    columns = [outputs[:, central(quantiles)], *([outputs] if quantiles else [])]
    if coverage is not None:
        first, last = find_bounds(quantiles, coverage)
        lower, upper = outputs[:, first] - correction, outputs[:, last] + correction
        # A negative correction may exceed half an interval; the interval then shrinks to its middle.
        middle = (lower + upper) / 2
        columns += [np.minimum(lower, middle), np.maximum(upper, middle)]
    return columns
