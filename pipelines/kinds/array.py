"""Column type "array": each row is an array, all of the same shape, with any number of dimensions.

Rows are stored as bytes in row-major order, which pyarrow reads ten times as fast as lists. If nulls are
kept, rows are stored as flat lists, because a null row has no size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from ringspark.pipelines.kinds.base import (
    BatchArray,
    Encoded,
    Kind,
    Shape,
    decode_fixed,
    decode_lists,
    is_list,
    list_offsets,
    list_type,
    make_fixed,
    make_lists,
    match_dtype,
    numbers,
)
from ringspark.pipelines.kinds.scalar import SPARK_DTYPES, TEMPORAL
from ringspark.pipelines.kinds.values import to_numbers
from ringspark.pipelines.rows import NumpyArray, Rows

if TYPE_CHECKING:
    from pyspark.sql.types import DataType
    from typing_extensions import Self


@dataclass(frozen=True)
class Array(Kind):
    """One array per row, all of the same shape; a batch holds `(rows, *shape)`.

    Attributes:
        dtype: NumPy dtype name of the elements; if it is empty, the Spark type determines it.
        shape: Shape of one row; None until the write has found it.
        nullable: Whether null rows are kept. They are stored as empty lists and read as zeros.
    """

    tag: ClassVar[str] = "array"
    is_choice: ClassVar[bool] = False
    dtype: str = ""
    shape: Shape | None = None
    nullable: bool = False

    def __post_init__(self) -> None:
        if self.shape is not None:
            object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))

    def adopt(self, name: str, data_type: DataType) -> Self:
        return replace(self, dtype=match_dtype(name, self.dtype, element_dtype(name, data_type)))

    def read_values(self, values: Any, source: str = "", zone: str = "UTC") -> Any:
        return to_numbers(values, self.dtype, None if self.shape is None else len(self.shape))

    @property
    def request(self) -> tuple[str, Shape]:
        return self.dtype, self.shape or (1,)

    def stored(self, name: str) -> dict[str, Any]:
        return {name: list_type(self.dtype)}

    def encode(self, values: Any, valid: Any = None) -> Encoded:
        lists, lengths = flatten(values, self.dtype)
        if valid is not None:
            lengths[0] = lengths[0][valid]
        if not len(lengths[0]):
            return Encoded([lists])
        low = tuple(int(level.min()) if len(level) else 0 for level in lengths)
        high = tuple(int(level.max(initial=0)) for level in lengths)
        return Encoded([self.pack(lists, (low, high), valid)], (low, high))

    def pack(self, lists: Any, shapes: tuple[Shape, Shape] | None, valid: Any) -> Any:
        if valid is not None or shapes is None or shapes[0] != shapes[1] or not prod(shapes[0]):
            return lists
        return make_fixed(lists, self.dtype)

    def measure(self, arrays: Sequence[Any]) -> NumpyArray:
        (array,) = arrays
        if not pa.types.is_fixed_size_binary(array.type):
            return numbers(array)
        size = array.type.byte_width // np.dtype(self.dtype).itemsize
        return decode_fixed(array, self.dtype, (size,)).reshape(-1)

    def settle(self, name: str, shapes: tuple[Shape, Shape] | None, nullable: bool) -> Self:
        low, high = shapes or ((0,), (0,))
        if low != high:
            dimension = next(i for i, (a, b) in enumerate(zip(low, high, strict=True)) if a != b)
            where, remedy = f" in dimension {dimension}", ""
            if len(low) == 1:
                where, remedy = "", f", or pass columns={{{name!r}: Padded()}} or Ragged() to write_shards"
            raise ValueError(
                f"column {name!r} has arrays of {low[dimension]} to {high[dimension]} elements{where}; "
                f"every row needs the same number; pad or cut them first{remedy}"
            )
        if prod(low) == 0:
            raise ValueError(f"column {name!r} holds only empty arrays; drop it with df.drop")
        if self.shape is not None and self.shape != low:
            raise ValueError(f"column {name!r} has arrays of shape {low}, not shape={self.shape}; omit shape")
        return replace(self, shape=low, nullable=nullable)

    def check_shapes(self, shapes: tuple[Shape, Shape] | None) -> None:
        for shape in shapes or ():
            if shape != self.shape:
                raise ValueError(
                    f"has an array of shape {shape}, but the model was trained on shape {self.shape}"
                )

    def decode(self, columns: Sequence[Any]) -> Rows:
        (column,) = columns
        if pa.types.is_fixed_size_binary(column.type):
            return decode_fixed(column, self.dtype, self.row_shape)
        lists = decode_lists(column, self.dtype)
        (leaf,), num_rows, size = lists.parts, len(column), prod(self.row_shape)
        if len(leaf) != num_rows * size or self.nullable:
            lengths = np.diff(lists.offsets)
            if not ((lengths == size) | ((lengths == 0) & self.nullable)).all():
                raise ValueError(f"should hold arrays of shape {self.row_shape}, but their sizes vary")
            filled = np.zeros((num_rows, size), dtype=self.dtype)
            filled[lengths > 0] = leaf.reshape(-1, size)
            leaf = filled
        return leaf.reshape(num_rows, *self.row_shape)

    def arrays(self, name: str) -> dict[str, BatchArray]:
        return {name: BatchArray(self.dtype, self.row_shape)}

    @property
    def row_shape(self) -> Shape:
        assert self.shape is not None, "the shape is not known before the write"
        return self.shape

    @property
    def row_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize * prod(self.row_shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape or ()))}]"


def element_dtype(name: str, data_type: DataType, depth: int | None = None) -> str:
    """Returns the dtype of the numbers in a (nested) Spark array type.

    Raises ValueError if the type is not an array of numbers or booleans, or is not nested `depth` levels
    deep.
    """
    element, found = data_type, 0
    while (inner := getattr(element, "elementType", None)) is not None:
        element, found = inner, found + 1
    simple = element.simpleString()
    if not found or simple not in SPARK_DTYPES or simple in TEMPORAL:
        raise ValueError(
            f"column {name!r} has type {data_type.simpleString()}, not an array of numbers or booleans; "
            "make it one first, e.g. with F.flatten or F.transform"
        )
    if depth is not None and found != depth:
        raise ValueError(
            f"column {name!r} has type {data_type.simpleString()}: only arrays without arrays inside may "
            "vary in length; flatten it first"
        )
    return SPARK_DTYPES[simple]


def flatten(values: Any, dtype: str) -> tuple[Any, list[NumpyArray]]:
    """Flattens the nested lists of each row into one list; also returns the lengths at each nesting level."""
    offsets = list_offsets(values)
    lengths = [np.diff(offsets)]
    leaf = values.flatten()
    while is_list(leaf.type):
        inner = list_offsets(leaf)
        lengths.append(np.diff(inner))
        offsets, leaf = inner[offsets], leaf.flatten()
    return make_lists(offsets, leaf, dtype), lengths
