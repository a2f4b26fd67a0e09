"""Statistics of a column. The tasks that write the column collect them, and the manifest stores them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringspark.pipelines.rows import NumpyArray

Number = int | float

# Elements summed at a time: few enough for the processor's cache and for small rounding errors.
_BLOCK = 1 << 16


@dataclass(frozen=True, kw_only=True)
class ColumnStats:
    """Counts and range of one column in one split. For arrays, every element counts.

    Attributes:
        nulls: Number of rows that were null or held a null. The other counts leave out the values that
            replace nulls.
        values: Number of elements, including NaN and infinite ones.
        fractional: Number of finite values that are not whole numbers; counted for scalar columns only.
        minimum: Smallest finite element (an int for integers); None if there is none.
        mean: Mean of the finite elements.
        deviations: Sum of squared deviations of the finite elements from their mean; None if unknown, such as
            a sum beyond the largest double.
    """

    rows: int = 0
    nulls: int = 0
    values: int = 0
    nans: int = 0
    infs: int = 0
    fractional: int = 0
    minimum: Number | None = None
    maximum: Number | None = None
    mean: float | None = None
    deviations: float | None = 0.0

    @property
    def finite(self) -> int:
        return self.values - self.nans - self.infs

    @property
    def std(self) -> float | None:
        """Standard deviation of the finite elements (divisor n - 1); None if there are fewer than two."""
        if self.finite < 2 or self.deviations is None:
            return None
        return math.sqrt(self.deviations / (self.finite - 1))

    def merge(self, other: ColumnStats) -> ColumnStats:
        mean, deviations = self.mean, self.deviations
        if other.mean is not None:
            if mean is None:
                mean, deviations = other.mean, other.deviations
            else:
                # Chan, Golub, LeVeque: "Updating formulae and a pairwise algorithm", 1979.
                share = other.finite / (self.finite + other.finite)
                gap, both = other.mean - mean, (deviations, other.deviations)
                deviations = _known(
                    sum(math.nan if d is None else d for d in both) + gap * gap * self.finite * share
                )
                mean = mean + gap * share if math.isfinite(gap) else mean * (1 - share) + other.mean * share
        counts = ("rows", "nulls", "values", "nans", "infs", "fractional")
        return ColumnStats(
            **{count: getattr(self, count) + getattr(other, count) for count in counts},
            minimum=_pick(min, self.minimum, other.minimum),
            maximum=_pick(max, self.maximum, other.maximum),
            mean=mean,
            deviations=deviations,
        )


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _pick(choose: Any, left: Any, right: Any) -> Any:
    if left is None or right is None:
        return right if left is None else left
    return choose(left, right)


class StatsCollector:
    def __init__(self, *, is_scalar: bool) -> None:
        self._is_scalar = is_scalar
        self.result = ColumnStats()

    def add(self, rows: int, numbers: NumpyArray) -> None:
        counts, finite = _measure(numbers)
        if self._is_scalar and finite.dtype.kind == "f":
            counts["fractional"] = int(np.count_nonzero(finite != np.rint(finite)))
        self.result = self.result.merge(ColumnStats(rows=rows, values=len(numbers), **counts))


def _measure(numbers: NumpyArray) -> tuple[dict[str, Any], NumpyArray]:
    if len(numbers) == 0:
        return {}, numbers
    low, high = numbers.min(), numbers.max()
    counts: dict[str, Any] = {}
    if numbers.dtype.kind == "f" and not (math.isfinite(low) and math.isfinite(high)):
        # A NaN makes both NaN. This is rare, so elements are examined only then.
        counts = {"nans": int(np.isnan(numbers).sum()), "infs": int(np.isinf(numbers).sum())}
        numbers = numbers[np.isfinite(numbers)]
        if len(numbers) == 0:
            return counts, numbers
        low, high = numbers.min(), numbers.max()
    exact = float if numbers.dtype.kind == "f" else int
    mean, deviations = _moments(numbers, max(abs(float(low)), abs(float(high))))
    moments = {"minimum": exact(low), "maximum": exact(high), "mean": mean, "deviations": deviations}
    return counts | moments, numbers


def _moments(numbers: NumpyArray, largest: float) -> tuple[float, float | None]:
    count, mean, deviations = 0, 0.0, 0.0
    # Squares of larger numbers, or sums of them, are infinite.
    unit = 2.0**600 if largest > 1e140 else 1.0
    for start in range(0, len(numbers), _BLOCK):
        block = numbers[start : start + _BLOCK].astype(np.float64)
        if unit > 1:
            block /= unit
        block_mean = float(block.mean())
        block -= block_mean
        share = len(block) / (count + len(block))
        gap = block_mean - mean
        deviations += float(block @ block) + gap * gap * count * share
        mean += gap * share
        count += len(block)
    return mean * unit, _known(deviations * unit * unit)
