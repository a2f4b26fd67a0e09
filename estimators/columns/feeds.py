"""Makes a model's inputs in the Python worker: turns Spark's pandas columns into NumPy arrays.

The dtypes are the same as in training (`training.feed`). A column that cannot be an input is refused in one
sentence that names it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ringspark.estimators.training.feed import Array, as_input
from ringspark.pipelines.kinds import Kind, Padded, Vocabulary
from ringspark.pipelines.kinds.base import make_lists
from ringspark.pipelines.nulls import fill_nulls
from ringspark.pipelines.rows import RaggedRows

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Feed:
    """One argument of `forward`, made from one pandas column.

    Attributes:
        name: Name of the column, for messages.
        shape: Shape of one row; None accepts any.
        dtype: "float32" or "int64"; empty follows the data, which tells nothing if there are no rows.
        kind: Kind whose code makes the array; None for numbers.
        part: Which of the kind's arrays it is: the suffix that follows the column's name in a batch.
        fills_nulls: Whether a null becomes zeros, as in the shards.
    """

    name: str
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    kind: Kind | None = None
    part: str = ""
    fills_nulls: bool = False

    def __call__(self, series: pd.Series[Any]) -> Array:
        """Returns an array of shape (rows, ...), fp32 or int64.

        Raises:
            ValueError: A row is null or NaN, or has another shape.
        """
        if self.kind is None:
            values = to_input(self.name, series, self.shape, fills_nulls=self.fills_nulls)
            return values.astype(self.dtype, copy=False) if self.dtype else values
        return as_input(self._through_kind(self.kind, series))

    def _through_kind(self, kind: Kind, series: pd.Series[Any]) -> Array:
        if isinstance(kind, Padded):
            arrow, valid = self._lists(kind, series.to_numpy()), None
        else:
            arrow = pa.array(series, pa.string() if isinstance(kind, Vocabulary) else pa.binary())
            valid = None
            if arrow.null_count:
                self._refuse_null()
                valid = arrow.is_valid().to_numpy(zero_copy_only=False)
                arrow = fill_nulls(arrow)
        try:
            encoded = kind.encode(arrow, valid)
            rows = kind.decode(encoded.arrays)
        except ValueError as error:
            raise ValueError(f"column {self.name!r} {error}") from None
        if isinstance(kind, Padded) and encoded.shapes is not None:
            (longest,) = encoded.shapes[1]
            if longest > (kind.length or 0):
                raise ValueError(
                    f"column {self.name!r} has an array of {longest} elements, the model was trained on "
                    f"up to {kind.length}; cut them first with F.slice"
                )
        if isinstance(rows, RaggedRows):
            return kind.finish("", rows)[self.part]
        return rows

    def _lists(self, kind: Padded, values: Array) -> Any:
        """Makes an Arrow array of lists from an array of NumPy arrays."""
        if any(value is None for value in values):
            self._refuse_null()
            values = np.array([np.zeros(0) if v is None else v for v in values] + [None], dtype=object)[:-1]
        offsets = np.cumsum([0, *(len(value) for value in values)])
        flat = np.concatenate([np.zeros(0, dtype=kind.dtype), *(v for v in values if len(v))])
        if flat.dtype.kind == "f" and np.isnan(flat).any():
            self._refuse_null(is_nan=True)
        return make_lists(offsets, flat.astype(kind.dtype), kind.dtype)

    def _refuse_null(self, *, is_nan: bool = False) -> None:
        if is_nan or not self.fills_nulls:
            raise null_error(self.name)


def null_error(name: str) -> ValueError:
    """Returns the error for a null or NaN where rows must be complete."""
    return ValueError(
        f"column {name!r} has a null or NaN in transform; fill or drop them first, e.g. by df.na.drop, "
        "or set handleInvalid to 'skip' or 'keep'"
    )


def to_input(
    name: str,
    series: pd.Series[Any],
    row_shape: tuple[int, ...] | None = None,
    *,
    fills_nulls: bool = False,
) -> Array:
    """Converts a pandas column of numbers, or of (nested) NumPy arrays of numbers, to the module's input.

    Args:
        name: Name of the column, for messages.
        series: The column as Spark hands it over.
        row_shape: Shape that every row must have; None accepts any shape that all rows share.
        fills_nulls: Whether null rows become zeros.

    Raises:
        ValueError: A value is null or NaN, or an array's length differs from the others or `row_shape`.
    """
    values, shape = series.to_numpy(), [len(series)]
    if fills_nulls and row_shape and values.dtype == object and any(value is None for value in values):
        return _with_zeros(name, values, row_shape)
    while values.dtype == object and len(values):
        try:
            lengths = set(map(len, values))
        except TypeError:  # a null has no length, and numbers have none either
            raise null_error(name) from None
        if len(lengths) > 1:
            where = "" if len(shape) == 1 else f" in dimension {len(shape) - 1}"
            raise ValueError(
                f"column {name!r} has arrays of {min(lengths)} to {max(lengths)} elements{where} in "
                "transform; every row needs the number that the model was trained on, pad or cut them first"
            )
        shape += lengths
        values = _end_to_end(values, shape[-1])
    if not len(series):
        shape += row_shape or ()
    # Inside arrays, pandas turns nulls into NaN and the integers beside them into floats.
    if values.dtype.kind == "f" and _has_nan(values):
        raise null_error(name)
    if row_shape is not None and tuple(shape[1:]) != tuple(row_shape):
        raise ValueError(
            f"column {name!r} has {_describe(shape[1:])}, the model was trained on {_describe(row_shape)}; "
            "give the column that was made in the same way"
        )
    if values.dtype == object:
        values = values.astype(np.float32)
    return as_input(values.reshape(shape))


def _has_nan(values: Array) -> bool:
    """Whether a number is NaN. A sum shows it in a fraction of the time that looking at each number takes."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isnan(values.sum())) and bool(np.isnan(values).any())


def _end_to_end(values: Array, length: int) -> Array:
    """Joins rows of equal length into one array."""
    first, last = values[0], values[-1]
    base = first.base if isinstance(first, np.ndarray) else None
    # Rows from one Arrow array are consecutive views into one NumPy array that holds them all; joining them
    # again would take several times as long.
    if base is not None and base.size == len(values) * length > 0 and base.flags.c_contiguous:
        step = (len(values) - 1) * length * base.itemsize
        if first.ctypes.data == base.ctypes.data and last.ctypes.data == base.ctypes.data + step:
            flat: Array = base.reshape(-1)
            return flat
    # This is several times faster than np.stack, which handles every row by itself.
    joined: Array = np.concatenate(values)
    return joined


def _with_zeros(name: str, values: Array, row_shape: tuple[int, ...]) -> Array:
    """Replaces null rows by zeros of the other rows' shape."""
    import pandas as pd

    there = np.array([value is not None for value in values])
    present = to_input(name, pd.Series(values[there]), row_shape)
    filled = np.zeros((len(values), *row_shape), dtype=present.dtype if len(present) else np.float32)
    filled[there] = present
    return filled


def _describe(shape: tuple[int, ...] | list[int]) -> str:
    if not shape:
        return "one number a row"
    if len(shape) == 1:
        return f"{shape[0]} numbers a row"
    return f"arrays of shape ({', '.join(map(str, shape))})"
