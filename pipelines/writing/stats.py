"""Facts about the values of a column, gathered while the shards are written.

They are collected batch by batch in the one pass that writes the data, merged
on the driver, and stored in the manifest: what the files hold and what the
manifest says cannot drift apart. Minimum, maximum, mean and deviation are over
finite values only; NaNs and infinities are counted beside them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ringspark.pipelines.distinct import DistinctSketch
from ringspark.pipelines.typed_json import record

Number = int | float
Array = npt.NDArray[Any]

# Elements summed at a time: they stay in the processor's cache, and rounding stays small.
_BLOCK = 1 << 16


@dataclass(frozen=True, kw_only=True)
class ColumnStats:
    """Counts and range of one column of one split; for arrays, over all elements.

    Attributes:
        rows: Rows stored.
        nulls: Rows that were null or held a null and were kept; what fills them counts nowhere below.
        values: Elements, NaN and infinite ones included.
        nans: NaN elements.
        infs: Infinite elements of either sign.
        fractional: Finite values that are not whole numbers; counted for scalar columns.
        minimum: Smallest finite element, an exact int for integers; None without one.
        maximum: Largest finite element.
        mean: Mean of the finite elements; None without one.
        deviations: Sum of squared deviations of the finite elements from their mean; None if unknown.
        distinct: Estimate of distinct values; None where it is not taken.
        sketch: What `distinct` is estimated from while tasks are merged; not kept in a manifest.
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
    distinct: int | None = None
    sketch: DistinctSketch | None = field(default=None, compare=False)

    @property
    def finite(self) -> int:
        """Elements that are neither NaN nor infinite."""
        return self.values - self.nans - self.infs

    @property
    def std(self) -> float | None:
        """Standard deviation of the finite elements (divisor n - 1, as in Spark); None below two."""
        if self.finite < 2 or self.deviations is None:
            return None
        return math.sqrt(self.deviations / (self.finite - 1))

    def merge(self, other: ColumnStats) -> ColumnStats:
        """Returns the stats of both together."""
        mean, deviations = self.mean, self.deviations
        if other.mean is not None:
            if mean is None:
                mean, deviations = other.mean, other.deviations
            else:
                # Chan, Golub, LeVeque: "Updating formulae and a pairwise algorithm", 1979.
                share = other.finite / (self.finite + other.finite)
                gap = other.mean - mean
                deviations = (deviations or 0.0) + (other.deviations or 0.0) + gap * gap * self.finite * share
                mean += gap * share
        sketch = self.sketch
        if other.sketch is not None:
            sketch = other.sketch if sketch is None else sketch.merge(other.sketch)
        return ColumnStats(
            rows=self.rows + other.rows,
            nulls=self.nulls + other.nulls,
            values=self.values + other.values,
            nans=self.nans + other.nans,
            infs=self.infs + other.infs,
            fractional=self.fractional + other.fractional,
            minimum=_pick(min, self.minimum, other.minimum),
            maximum=_pick(max, self.maximum, other.maximum),
            mean=mean,
            deviations=deviations,
            distinct=None if sketch is None else sketch.count,
            sketch=sketch,
        )

    def without_sketch(self) -> ColumnStats:
        """Returns the stats as a manifest keeps them: moments that have overflown are unknown."""
        mean = self.mean if self.mean is not None and math.isfinite(self.mean) else None
        deviations = self.deviations
        if deviations is not None and not (math.isfinite(deviations) and mean == self.mean):
            deviations = None
        return replace(self, sketch=None, mean=mean, deviations=deviations)

    def to_json(self) -> dict[str, Any]:
        """Returns the stats as JSON values."""
        data = {field.name: getattr(self, field.name) for field in fields(self)}
        data["sketch"] = None if self.sketch is None else self.sketch.to_text()
        return {key: value for key, value in data.items() if value is not None}

    @staticmethod
    def from_json(data: dict[str, Any]) -> ColumnStats:
        """Reads what `to_json` returned."""
        values = {field.name: data[field.name] for field in fields(ColumnStats) if field.name in data}
        values.setdefault("deviations", None)
        sketch = values.pop("sketch", None)
        stats = record(ColumnStats, values)
        return stats if sketch is None else replace(stats, sketch=DistinctSketch.from_text(sketch))


class StatsCollector:
    """Statistics of one column, a batch at a time. Runs in a task that writes."""

    def __init__(self, *, is_scalar: bool, counts_distinct: bool) -> None:
        self._is_scalar = is_scalar
        self._sketch = DistinctSketch() if counts_distinct else None
        self._stats = ColumnStats()

    def add(self, rows: int, numbers: Array) -> None:
        """Takes the numbers of `rows` rows."""
        counts, finite = _measure(numbers)
        if self._is_scalar and finite.dtype.kind == "f":
            counts["fractional"] = int(np.count_nonzero(finite != np.rint(finite)))
        if self._sketch is not None:
            # Kept apart from the merging below: a sketch that is full looks at a few values only.
            self._sketch = self._sketch.add(finite)
        self._stats = self._stats.merge(ColumnStats(rows=rows, values=len(numbers), **counts))

    def result(self) -> ColumnStats:
        """Returns the statistics so far."""
        distinct = None if self._sketch is None else self._sketch.count
        return replace(self._stats, sketch=self._sketch, distinct=distinct)


def _measure(numbers: Array) -> tuple[dict[str, Any], Array]:
    """Returns counts and moments, and the finite numbers among those given."""
    if len(numbers) == 0:
        return {}, numbers
    low, high = numbers.min(), numbers.max()
    counts: dict[str, Any] = {}
    if numbers.dtype.kind == "f" and not (math.isfinite(low) and math.isfinite(high)):
        # Rare, so only now look at every element. A NaN makes both of them NaN.
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


def _moments(numbers: Array) -> tuple[float, float]:
    """Returns mean and sum of squared deviations, in float64."""
    count, mean, deviations = 0, 0.0, 0.0
    # Squares of doubles beyond 1e150 overflow; such columns get an infinite deviation, without a warning.
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


def _pick(choose: Any, left: Any, right: Any) -> Any:
    if left is None or right is None:
        return right if left is None else left
    return choose(left, right)
