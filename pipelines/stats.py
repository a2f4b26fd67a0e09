"""Facts about the values of a column, gathered while the shards are written.

They are collected batch by batch in the one pass that writes the data, merged
on the driver, and stored in the manifest: what the files hold and what the
manifest says cannot drift apart. Minimum, maximum and mean are over finite
values only; NaNs and infinities are counted beside them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Number = int | float


@dataclass(frozen=True, kw_only=True)
class ColumnStats:
    """Counts and range of one column of one split; for arrays, over all elements.

    Attributes:
        rows: Rows seen.
        nulls: Null rows and null elements.
        values: Elements that are not null, NaN and infinite ones included.
        nans: NaN elements.
        infs: Infinite elements of either sign.
        fractional: Finite values that are not whole numbers; counted for scalar columns.
        minimum: Smallest finite element, an exact int for integers; None without one.
        maximum: Largest finite element.
        total: Sum of the finite elements in float64.
        min_length: Shortest array; None for scalars and for no rows.
        max_length: Longest array.
    """

    rows: int = 0
    nulls: int = 0
    values: int = 0
    nans: int = 0
    infs: int = 0
    fractional: int = 0
    minimum: Number | None = None
    maximum: Number | None = None
    total: float = 0.0
    min_length: int | None = None
    max_length: int | None = None

    @property
    def mean(self) -> float | None:
        """Mean of the finite elements; None without one."""
        finite = self.values - self.nans - self.infs
        return self.total / finite if finite else None

    def merge(self, other: ColumnStats) -> ColumnStats:
        """Returns the stats of both together."""
        return ColumnStats(
            rows=self.rows + other.rows,
            nulls=self.nulls + other.nulls,
            values=self.values + other.values,
            nans=self.nans + other.nans,
            infs=self.infs + other.infs,
            fractional=self.fractional + other.fractional,
            minimum=_pick(min, self.minimum, other.minimum),
            maximum=_pick(max, self.maximum, other.maximum),
            total=self.total + other.total,
            min_length=_pick(min, self.min_length, other.min_length),
            max_length=_pick(max, self.max_length, other.max_length),
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the stats as JSON values."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @staticmethod
    def from_json(data: dict[str, Any]) -> ColumnStats:
        """Reads what `to_json` returned."""
        return ColumnStats(**{field.name: data[field.name] for field in fields(ColumnStats)})


def measure(data: Any) -> ColumnStats:
    """Measures one Arrow array or chunked array of numbers, booleans or lists of them."""
    chunks = data.chunks if isinstance(data, pa.ChunkedArray) else [data]
    return reduce(ColumnStats.merge, map(_measure_chunk, chunks), ColumnStats())


def _measure_chunk(chunk: Any) -> ColumnStats:
    nulls, values = chunk.null_count, chunk
    min_length = max_length = None
    if pa.types.is_list(chunk.type) or pa.types.is_large_list(chunk.type):
        values = chunk.flatten()
        lengths = np.diff(chunk.offsets.to_numpy())
        if nulls:
            # A null row has no length of its own; it is reported as a null.
            lengths = lengths[chunk.is_valid().to_numpy(zero_copy_only=False)]
        if len(lengths):
            min_length, max_length = int(lengths.min()), int(lengths.max())
        nulls += values.null_count
    if values.null_count:
        values = values.drop_null()
    array = values.to_numpy(zero_copy_only=False)
    counts = _measure_values(array)
    if min_length is None:
        counts["fractional"] = _count_fractional(array)
    return ColumnStats(
        rows=len(chunk),
        nulls=nulls,
        values=len(array),
        min_length=min_length,
        max_length=max_length,
        **counts,
    )


def _count_fractional(array: npt.NDArray[Any]) -> int:
    if array.dtype.kind != "f":
        return 0
    return int(((array != np.rint(array)) & np.isfinite(array)).sum())


def _measure_values(array: npt.NDArray[Any]) -> dict[str, Any]:
    if len(array) == 0:
        return {}
    if array.dtype.kind != "f":
        return {
            "minimum": int(array.min()),
            "maximum": int(array.max()),
            "total": float(array.sum(dtype=np.float64)),
        }
    nans = infs = 0
    minimum, maximum = float(array.min()), float(array.max())
    if not (math.isfinite(minimum) and math.isfinite(maximum)):
        # Rare, so only now look at every element. A NaN makes both of them NaN.
        nans, infs = int(np.isnan(array).sum()), int(np.isinf(array).sum())
        array = array[np.isfinite(array)]
        if len(array) == 0:
            return {"nans": nans, "infs": infs}
        minimum, maximum = float(array.min()), float(array.max())
    return {
        "nans": nans,
        "infs": infs,
        "minimum": minimum,
        "maximum": maximum,
        "total": float(array.sum(dtype=np.float64)),
    }


def _pick(choose: Any, left: Any, right: Any) -> Any:
    if left is None or right is None:
        return right if left is None else left
    return choose(left, right)
