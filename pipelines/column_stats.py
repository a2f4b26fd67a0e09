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


def measure(rows: int, numbers: NumpyArray, *, is_scalar: bool) -> ColumnStats:
    """Returns the statistics of some rows of a column; `numbers` are their elements, (elements,)."""
    stats = ColumnStats(rows=rows)
    for start in range(0, len(numbers), _BLOCK):
        stats = stats.merge(_measure_block(numbers[start : start + _BLOCK], is_scalar))
    return stats


def _measure_block(numbers: NumpyArray, is_scalar: bool) -> ColumnStats:
    is_float = numbers.dtype.kind == "f"
    counts = {"values": len(numbers)}
    low, high = numbers.min(), numbers.max()
    if is_float and not (math.isfinite(low) and math.isfinite(high)):
        # A NaN makes both NaN. This is rare, so elements are examined only then.
        counts |= {"nans": int(np.isnan(numbers).sum()), "infs": int(np.isinf(numbers).sum())}
        numbers = numbers[np.isfinite(numbers)]
        if len(numbers) == 0:
            return ColumnStats(**counts)
        low, high = numbers.min(), numbers.max()
    if is_scalar and is_float:
        counts["fractional"] = int(np.count_nonzero(numbers != np.rint(numbers)))
    # Squares of larger numbers, or sums of them, are infinite.
    unit = 2.0**600 if max(abs(float(low)), abs(float(high))) > 1e140 else 1.0
    scaled = numbers.astype(np.float64)
    if unit > 1:
        scaled /= unit
    mean = float(scaled.mean())
    scaled -= mean
    exact = float if is_float else int
    return ColumnStats(
        **counts,
        minimum=exact(low),
        maximum=exact(high),
        mean=mean * unit,
        deviations=_known(float(scaled @ scaled) * unit * unit),
    )
