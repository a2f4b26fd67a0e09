"""Turns Spark's Arrow columns into the NumPy arrays of a model's inputs, in the Python worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ringspark.estimators.training.feed import Array, to_network_input
from ringspark.pipelines.kinds import Kind, Ragged, Sparse
from ringspark.pipelines.kinds.base import is_list, list_offsets
from ringspark.pipelines.nulls import fill_nulls


@dataclass(frozen=True, kw_only=True)
class Feed:
    """Makes one argument of `forward` from one Arrow column.

    Attributes:
        shape: Shape of one row; None accepts any.
        kind: Column type whose code makes the array; None for numbers.
        part: Suffix that selects one of the column type's arrays; see `ModelInput`.
    """

    name: str
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    kind: Kind | None = None
    part: str = ""
    fills_nulls: bool = False

    @property
    def judges(self) -> bool:
        """Whether only Python can find out if a value is readable, such as an image."""
        return self.kind is not None and type(self.kind).read is not Kind.read

    def read(self, column: pa.Array) -> tuple[pa.Array, dict[int, str]]:
        return (column, {}) if self.kind is None else self.kind.read(column)

    def make_arrays(self, kind: Kind, column: pa.Array) -> dict[str, Array]:
        valid = None
        if column.null_count:
            if not self.fills_nulls:
                raise null_error(self.name)
            valid = column.is_valid().to_numpy(zero_copy_only=False)
            column = fill_nulls(column)
        if isinstance(kind, Ragged | Sparse):
            lists = column.field("values") if isinstance(kind, Sparse) else column
            if _holds_nan(lists.flatten()):
                raise null_error(self.name)
        return kind.make_arrays(self.name, column, valid)


def make_inputs(feeds: Sequence[Feed], columns: Sequence[pa.Array]) -> list[Array]:
    """Returns the arguments of `forward`, (rows, ...) fp32 or int64, from the results of `Feed.read`."""
    # A column type makes all arrays of a column at once.
    made: dict[tuple[str, int], dict[str, Array]] = {}

    def make(feed: Feed, column: pa.Array) -> Array:
        if feed.kind is None:
            values = to_input(feed.name, column, feed.shape, fills_nulls=feed.fills_nulls)
            return values.astype(feed.dtype, copy=False) if feed.dtype else values
        key = feed.name, id(feed.kind)
        if key not in made:
            made[key] = feed.make_arrays(feed.kind, column)
        return to_network_input(made[key][feed.part])

    return [make(feed, column) for feed, column in zip(feeds, columns, strict=True)]


def unread_error(name: str, problem: str) -> ValueError:
    return ValueError(
        f"column {name!r} {problem} in transform; repair or drop it, or set handleInvalid to 'skip' or 'keep'"
    )


def null_error(name: str) -> ValueError:
    return ValueError(
        f"column {name!r} has a null or NaN in transform; fill or drop them first, e.g. by "
        f"df.na.drop(subset=[{name!r}]), or set handleInvalid to 'skip' or 'keep'"
    )


def to_input(
    name: str, column: pa.Array, row_shape: tuple[int, ...] | None = None, *, fills_nulls: bool = False
) -> Array:
    """Converts an Arrow column of numbers, or of (nested) lists of numbers, to the module's input."""
    if fills_nulls and row_shape is not None and column.null_count:
        there = column.is_valid()
        present = to_input(name, column.filter(there), row_shape)
        filled = np.zeros((len(column), *row_shape), dtype=present.dtype if len(present) else np.float32)
        filled[there.to_numpy(zero_copy_only=False)] = present
        return filled
    leaf, shape = column, [len(column)]
    while is_list(leaf.type):
        if leaf.null_count:
            raise null_error(name)
        lengths = np.diff(list_offsets(leaf))
        if len(lengths):
            low, high = int(lengths.min()), int(lengths.max())
            if low != high:
                where = "" if len(shape) == 1 else f" in dimension {len(shape) - 1}"
                raise ValueError(
                    f"column {name!r} has arrays of {low} to {high} elements{where} in transform; every row "
                    "needs as many elements as in the training; pad or cut the arrays first"
                )
            shape.append(low)
        leaf = leaf.flatten()
    if _holds_nan(leaf):
        raise null_error(name)
    if not len(column):
        shape += row_shape or ()
    if row_shape is not None and tuple(shape[1:]) != tuple(row_shape):
        raise ValueError(
            f"column {name!r} has {_describe(shape[1:])}, but the model was trained on "
            f"{_describe(row_shape)}; give a column that was made as in the training"
        )
    return to_network_input(_numbers(leaf).reshape(shape))


def _numbers(leaf: pa.Array) -> Array:
    values: Array = leaf.to_numpy(zero_copy_only=False)  # without a copy if the layouts agree
    # Empty columns of pandas have no numeric type.
    return values.astype(np.float32) if values.dtype == object else values


def _holds_nan(leaf: pa.Array) -> bool:
    if leaf.null_count or not pa.types.is_floating(leaf.type):
        return bool(leaf.null_count)
    values = _numbers(leaf)
    # A sum finds NaN in a fraction of the time of a search.
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isnan(values.sum())) and bool(np.isnan(values).any())


def _describe(shape: tuple[int, ...] | list[int]) -> str:
    if not shape:
        return "one number per row"
    if len(shape) == 1:
        return f"{shape[0]} numbers per row"
    return f"arrays of shape ({', '.join(map(str, shape))})"
