"""Base class of the column types: how a column is checked, stored, read back and put into a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from ringspark.pipelines.rows import NumpyArray, RaggedRows, Rows

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql.types import DataType
    from typing_extensions import Self

DTYPES = ("bool", "int8", "int16", "int32", "int64", "float32", "float64")
"""NumPy dtypes that Spark's numbers have; images and raw bytes may have others."""

HOLDS_NULLS = "holds nulls; write the shards again without them"

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Encoded:
    """One batch of a column as it is stored: one array for each entry of `Kind.stored`.

    `shapes` are the smallest and the largest size of a row in each dimension; None for scalars or if there
    are no rows.
    """

    arrays: list[Any]
    shapes: tuple[Shape, Shape] | None = None


@dataclass(frozen=True)
class BatchArray:
    """One array that a column adds to a batch.

    Attributes:
        dtype: NumPy dtype name.
        shape: Shape of the array, without the first dimension.
        varies: Whether the shape differs between batches; `shape` is then the largest possible one.
        offsets: If rows vary in length, name of the array of offsets: row i has the values from offset i to
            offset i + 1. Empty if the first dimension counts rows.
    """

    dtype: str
    shape: Shape = ()
    varies: bool = False
    offsets: str = ""

    @property
    def per_row(self) -> bool:
        return not self.offsets


@dataclass(frozen=True)
class Kind(ABC):
    """Type of a column. Instances are frozen, and each field is a JSON value.

    Attributes:
        tag: Name of the column type in the manifest.
        is_choice: Whether users must choose this type. If so, `transform` converts rows by the type's code.
        suffixes: Suffixes of the column's arrays in a batch.
    """

    tag: ClassVar[str]
    is_choice: ClassVar[bool] = True
    suffixes: ClassVar[tuple[str, ...]] = ("",)

    # On the driver, before the write.

    @abstractmethod
    def adopt(self, name: str, data_type: DataType) -> Self:
        """Returns the column type, with unset fields filled in from a column's Spark type.

        Raises ValueError if the Spark type does not fit.
        """

    def select(self, source: SparkColumn, data_type: DataType) -> SparkColumn:
        """Returns the Spark expression whose values `read` and `encode` take. A null stays null."""
        return source

    # Without Spark.

    @abstractmethod
    def read_values(self, values: Any, source: str = "", zone: str = "UTC") -> Any:
        """Returns the Arrow array that `select` gives, for an Arrow array, a pandas column or a list.

        Raises ValueError if a value has another type; the message is a clause that follows "column 'x'".

        Args:
            source: Spark type of the column; "" takes dates and times only as Arrow has them.
            zone: Time zone of timestamps without an offset.
        """

    @property
    def packages(self) -> Any:
        """Names of packages that reading values needs, in addition to those of every column."""
        return ()

    @property
    def request(self) -> Any:
        """Type of a value in JSON ("str", "bytes" or a dtype) and its shape; None if it has several forms."""
        return None

    @abstractmethod
    def stored(self, name: str) -> dict[str, Any]:
        """Returns the Arrow type of each Parquet column of the stored form, by name."""

    # In the writing task.

    def read(self, values: Any) -> tuple[Any, dict[int, str]]:
        """Decodes an Arrow array from Spark, for column types whose values only Python can check.

        Returns the array for `encode`, in which unreadable rows are null, and the reason for each unreadable
        row. A reason is a clause that follows "column 'x'".
        """
        return values, {}

    @abstractmethod
    def encode(self, values: Any, valid: Any = None) -> Encoded:
        """Converts the result of `read` into the stored form.

        Nulls have been replaced by zeros or empty values.

        `valid` is false for rows that were null; None if the column keeps no nulls. Raises ValueError if a
        value cannot be stored; the message is a clause that follows "column 'x'".
        """

    def measure(self, arrays: Sequence[Any]) -> NumpyArray:
        """Returns the numeric values in the stored arrays, from which the column statistics are computed."""
        return numbers(arrays[-1])

    # On the driver, after the write.

    def settle(self, name: str, shapes: tuple[Shape, Shape] | None, nullable: bool) -> Self:
        """Returns the column type, with unset fields filled in after all rows are written.

        `shapes` has the form of `Encoded.shapes`, over all rows. `nullable` is True if null rows were stored.
        Raises ValueError if the shapes do not fit.
        """
        return self

    # In a reader.

    @abstractmethod
    def decode(self, columns: Sequence[Any]) -> Rows:
        """Converts stored columns (Arrow arrays without nulls) into rows in memory.

        Raises ValueError if the columns hold something else; the message is a clause that follows "column
        'x'".
        """

    def finish(self, name: str, rows: Any) -> dict[str, NumpyArray]:
        return {name: rows}

    def check_shapes(self, shapes: tuple[Shape, Shape] | None) -> None:
        """Raises ValueError if new rows with these shapes do not fit the model; the message is a clause."""
        return

    def make_arrays(self, name: str, values: Any, valid: Any = None) -> dict[str, NumpyArray]:
        """Returns the arrays of a batch by suffix, as a network takes them: offsets end with the last row.

        `values` and `valid` are arguments of `encode`.
        """
        # The type is not nullable if the training rows held no null, but new rows may hold one.
        kind: Any = self
        if valid is not None and hasattr(self, "nullable"):
            kind = replace(kind, nullable=True)
        try:
            encoded = kind.encode(values, valid)
            kind.check_shapes(encoded.shapes)
            rows = kind.decode(encoded.arrays)
        except ValueError as error:
            raise ValueError(f"column {name!r} {error}") from None
        made = {key.removeprefix(name): array for key, array in kind.finish(name, rows).items()}
        ends = {key for key, of in kind.arrays("").items() if key and of.offsets == key}
        return {key: array[:-1] if key in ends else array for key, array in made.items()}

    def batch_names(self, name: str) -> tuple[str, ...]:
        return tuple(name + suffix for suffix in self.suffixes)

    def arguments(self, name: str) -> tuple[str, ...]:
        """Returns the names of the arrays that a network takes as arguments, in order."""
        return self.batch_names(name)[:1]

    @property
    def value_bytes(self) -> int:
        """Bytes per value if rows vary in length; 0 if every row takes `row_bytes`."""
        return 0

    @property
    def selected(self) -> Any:
        """Arrow type of the values of `select` if they are structs."""
        return None

    @property
    def num_ids(self) -> int | None:
        """Number of rows that an embedding table for the ids needs; None if the column holds no ids."""
        return None

    @abstractmethod
    def arrays(self, name: str) -> dict[str, BatchArray]:
        """Describes each array that `finish` returns, by name."""

    @property
    @abstractmethod
    def row_bytes(self) -> int:
        """Approximate bytes of one row in a batch."""

    @property
    def held_bytes(self) -> int:
        """Approximate bytes of one row after decoding, before it is put into a batch."""
        return self.row_bytes

    def to_json(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"kind": self.tag} | {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    def __str__(self) -> str:
        return self.tag


def match_dtype(name: str, asked: str, found: str) -> str:
    if asked and asked != found:
        raise ValueError(f"column {name!r} holds {found}, but dtype={asked!r} is set; cast it in Spark first")
    return found


def numbers(values: Any) -> NumpyArray:
    """Returns the numbers of an Arrow array, or of all lists in it, as a NumPy array; a view if possible."""
    leaf = values.flatten() if is_list(values.type) else values
    array: NumpyArray = leaf.to_numpy(zero_copy_only=False)
    return array


def one_chunk(column: Any) -> Any:
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def is_list(data_type: Any) -> bool:
    return bool(pa.types.is_list(data_type) or pa.types.is_large_list(data_type))


def list_offsets(values: Any) -> NumpyArray:
    offsets: NumpyArray = values.offsets.to_numpy().astype(np.int64)
    return offsets if not len(offsets) or offsets[0] == 0 else offsets - offsets[0]


def number_type(dtype: str) -> Any:
    return pa.from_numpy_dtype(np.dtype(dtype))


def list_type(dtype: str) -> Any:
    return pa.list_(pa.field("element", number_type(dtype), nullable=False))


def make_lists(offsets: NumpyArray, leaf: Any, dtype: str) -> Any:
    leaf = pa.array(leaf, number_type(dtype)) if isinstance(leaf, np.ndarray) else leaf
    if len(offsets) and offsets[-1] > np.iinfo(np.int32).max:
        raise ValueError(
            "has more than 2**31 elements in one batch of rows; lower "
            "spark.sql.execution.arrow.maxRecordsPerBatch"
        )
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), leaf, type=list_type(dtype))


def make_fixed(lists: Any, dtype: str) -> Any:
    data = np.ascontiguousarray(numbers(lists), dtype=np.dtype(dtype).newbyteorder("<"))
    width = pa.binary(data.nbytes // len(lists))
    return pa.Array.from_buffers(width, len(lists), [None, pa.py_buffer(data)])


def decode_fixed(column: Any, dtype: str, shape: Shape) -> NumpyArray:
    """Returns a view of a stored column with rows of equal size, or raises ValueError."""
    stored = np.dtype(dtype).newbyteorder("<")
    width = stored.itemsize * prod(shape)
    if column.null_count or column.type != pa.binary(width):
        raise ValueError(f"should hold {width} bytes per row without nulls, but the data is {column.type}")
    if not len(column):
        return np.zeros((0, *shape), dtype=dtype)
    # A boolean array may only hold the bytes 0 and 1.
    raw = np.frombuffer(column.buffers()[1], np.uint8 if dtype == "bool" else stored)
    rows = raw[column.offset * prod(shape) :][: len(column) * prod(shape)].reshape(len(column), *shape)
    return rows != 0 if dtype == "bool" else rows.astype(dtype, copy=False)


def decode_lists(column: Any, dtype: str) -> RaggedRows:
    """Returns a view of a stored column of lists, or raises ValueError."""
    if not is_list(column.type):
        raise ValueError(f"should hold arrays, but the data is {column.type}")
    leaf = column.flatten()
    if column.null_count or leaf.null_count:
        raise ValueError(HOLDS_NULLS)
    if leaf.type != number_type(dtype):
        raise ValueError(f"should hold arrays of {dtype}, but the data is {column.type}")
    return RaggedRows(list_offsets(column), (leaf.to_numpy(zero_copy_only=False),))


def range_of(values: NumpyArray) -> tuple[Shape, Shape] | None:
    return None if not len(values) else ((int(values.min()),), (int(values.max()),))
