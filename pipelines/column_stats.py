"""Facts about the values of a column, as the manifest keeps them.

Minimum, maximum, mean and deviation are over finite values only; NaNs and infinities are counted beside them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ringspark.pipelines.typed_json import record

Number = int | float


@dataclass(frozen=True, kw_only=True)
class ColumnStats:
    """Counts and range of one column of one split; for arrays they cover all elements.

    Attributes:
        rows: Rows stored.
        nulls: Rows kept although they were null or held a null; the counts below leave their fill values out.
        values: Elements, NaN and infinite ones included.
        nans: NaN elements.
        infs: Infinite elements of either sign.
        fractional: Finite values that are not whole numbers; counted for scalar columns.
        minimum: Smallest finite element, an exact int for integers; None without one.
        maximum: Largest finite element.
        mean: Mean of the finite elements; None without one.
        deviations: Sum of squared deviations of the finite elements from their mean; None if unknown.
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
        )

    def without_overflows(self) -> ColumnStats:
        """Returns the stats as a manifest keeps them: moments that overflowed become unknown."""
        mean = self.mean if self.mean is not None and math.isfinite(self.mean) else None
        deviations = self.deviations
        if deviations is not None and not (math.isfinite(deviations) and mean == self.mean):
            deviations = None
        return replace(self, mean=mean, deviations=deviations)

    def to_json(self) -> dict[str, Any]:
        """Returns the stats as JSON values."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> ColumnStats:
        """Reads what `to_json` returned."""
        return record(ColumnStats, data)


def _pick(choose: Any, left: Any, right: Any) -> Any:
    if left is None or right is None:
        return right if left is None else left
    return choose(left, right)
