"""`Kind`: how one column is checked, stored in Parquet, read back and handed to a batch.

One object plays three parts: the user chooses it (`Padded(value=0)`), it travels
to the tasks, and the manifest keeps it, completed by what the tasks saw. Each
kind has its file and is listed in `KINDS`; the shuffle in between sees only
`rows.Rows`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
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

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Encoded:
    """One batch of a column as it is stored.

    Attributes:
        arrays: One Arrow array for each of `Kind.stored`, without nulls.
        shapes: Smallest and largest shape of a row in each dimension; None for scalars or no rows.
    """

    arrays: list[Any]
    shapes: tuple[Shape, Shape] | None = None


@dataclass(frozen=True)
class BatchArray:
    """Description of one array that a column gives to a batch.

    Attributes:
        dtype: NumPy dtype name.
        shape: Shape after the first dimension.
        varies: Whether a batch may have a smaller shape; `shape` is the largest then.
        offsets: Name of the batch's array of offsets, for rows of varying length laid end to end: row i is
            from offset i to offset i + 1. That array names itself. Empty if the first dimension is the rows.
    """

    dtype: str
    shape: Shape = ()
    varies: bool = False
    offsets: str = ""

    @property
    def per_row(self) -> bool:
        """Whether the first dimension is the rows of the batch."""
        return not self.offsets


@dataclass(frozen=True)
class Kind(ABC):
    """The kind of one column. Instances are frozen, and every field is a JSON value.

    Attributes:
        tag: The kind's name in the manifest.
        is_choice: Whether the user chooses it: transform then makes the values by its code, as the write.
            Numbers, arrays and vectors need no choice.
    """

    tag: ClassVar[str]
    is_choice: ClassVar[bool] = True

    # ------------------------------------------------------------- on the driver, before the write

    @abstractmethod
    def adopt(self, name: str, data_type: DataType) -> Self:
        """Returns the kind completed for a Spark type.

        Raises:
            ValueError: This kind cannot hold that type.
        """

    def select(self, source: SparkColumn, data_type: DataType) -> SparkColumn:
        """Returns the Spark expression whose values `encode` takes. A null stays a null."""
        return source

    @abstractmethod
    def stored(self, name: str) -> dict[str, Any]:
        """Returns Parquet column name -> Arrow type."""

    # ------------------------------------------------------------------------- in the writing task

    def read(self, values: Any) -> tuple[Any, dict[int, str]]:
        """Brings an Arrow array from Spark into what `encode` takes, where only Python can judge a value.

        Returns:
            The array, whose rows that cannot be read are null, and why, by row: each text completes
            "column 'x' ...".
        """
        return values, {}

    @abstractmethod
    def encode(self, values: Any, valid: Any = None) -> Encoded:
        """Brings an Arrow array from Spark, without nulls, into the stored form.

        Args:
            values: The array that `read` returned; rows that were null have been filled with zeros or
                emptied.
            valid: Boolean NumPy array, false where a row was null; None if the column keeps no nulls.

        Raises:
            ValueError: A value cannot be stored; the text completes "column 'x' ...".
        """

    def measured(self, arrays: Sequence[Any]) -> NumpyArray:
        """Returns the numbers in the stored arrays that the statistics cover."""
        return numbers(arrays[-1])

    # -------------------------------------------------------------- on the driver, after the write

    def settle(self, name: str, shapes: tuple[Shape, Shape] | None, nullable: bool) -> Self:
        """Returns the kind completed by the shapes that the tasks saw.

        Raises:
            ValueError: The shapes do not fit the kind; the message says what to do.
        """
        return self

    # --------------------------------------------------------------------------------- in a reader

    @abstractmethod
    def decode(self, columns: Sequence[Any]) -> Rows:
        """Brings stored columns (Arrow arrays without nulls, one chunk) into memory.

        Raises:
            ValueError: The columns hold something else than the kind says; the text completes
                "column 'x' ...".
        """

    def finish(self, name: str, rows: Any) -> dict[str, NumpyArray]:
        """Returns the arrays of a batch from its rows, `RaggedRows` or dense ones as `decode` gives them."""
        return {name: rows}

    def batch_names(self, name: str) -> tuple[str, ...]:
        """Returns the names of the arrays that the column gives to a batch."""
        return (name,)

    def arguments(self, name: str) -> tuple[str, ...]:
        """Returns the names of the arrays that a network gets of the column, in that order."""
        return self.batch_names(name)[:1]

    @property
    def value_bytes(self) -> int:
        """Bytes of one value, for rows of any number of them; 0 where `row_bytes` is no guess."""
        return 0

    @property
    def selected(self) -> Any:
        """Arrow type of what `select` gives; None if that follows the column."""
        return None

    @property
    def num_ids(self) -> int | None:
        """Number of different ids that a batch may hold, which a table of embeddings has rows for."""
        return None

    @abstractmethod
    def arrays(self, name: str) -> dict[str, BatchArray]:
        """Returns, by name, a description of each array that `finish` returns."""

    @property
    @abstractmethod
    def row_bytes(self) -> int:
        """Approximate number of bytes that one row takes in a batch."""

    @property
    def held_bytes(self) -> int:
        """Approximate number of bytes of one row as `decode` gives it."""
        return self.row_bytes

    # ----------------------------------------------------------------------------------- as a value

    def to_json(self) -> dict[str, Any]:
        """Returns the kind as JSON values."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            "kind": self.tag,
            **{key: list(value) if isinstance(value, tuple) else value for key, value in values.items()},
        }

    def __str__(self) -> str:
        return self.tag


def matching_dtype(name: str, asked: str, found: str) -> str:
    """Returns the dtype of a Spark type; refuses if the user asked for another, as nothing is cast here."""
    if asked and asked != found:
        raise ValueError(f"column {name!r} holds {found} where {asked} was asked for; cast it in Spark first")
    return found


def numbers(values: Any) -> NumpyArray:
    """Returns the numbers of an Arrow array, or of all its lists, as NumPy; a view where possible."""
    leaf = values.flatten() if is_list(values.type) else values
    array: NumpyArray = leaf.to_numpy(zero_copy_only=False)
    return array


def is_list(data_type: Any) -> bool:
    """Whether an Arrow type is a list of either width."""
    return bool(pa.types.is_list(data_type) or pa.types.is_large_list(data_type))


def list_offsets(values: Any) -> NumpyArray:
    """Returns (rows + 1,) int64 offsets from 0 of an Arrow list array without nulls."""
    offsets: NumpyArray = values.offsets.to_numpy().astype(np.int64)
    return offsets if not len(offsets) or offsets[0] == 0 else offsets - offsets[0]


def number_type(dtype: str) -> Any:
    """Returns the Arrow type of a NumPy dtype name."""
    return pa.bool_() if dtype == "bool" else pa.from_numpy_dtype(np.dtype(dtype))


def list_type(dtype: str) -> Any:
    """Returns the Arrow type of lists of numbers.

    The elements are declared non-null, so Parquet stores no definition levels for them: files are
    smaller and reads faster.
    """
    return pa.list_(pa.field("element", number_type(dtype), nullable=False))


def make_lists(offsets: NumpyArray, leaf: Any, dtype: str) -> Any:
    """Returns an Arrow list array from offsets that start at 0 and its elements."""
    leaf = pa.array(leaf, number_type(dtype)) if isinstance(leaf, np.ndarray) else leaf
    if len(offsets) and offsets[-1] > np.iinfo(np.int32).max:
        raise ValueError(
            "has more than 2**31 elements in one batch of rows; lower "
            "spark.sql.execution.arrow.maxRecordsPerBatch"
        )
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), leaf, type=list_type(dtype))


def make_fixed(lists: Any, dtype: str) -> Any:
    """Returns Arrow lists of one size as binary values of one width: the elements, little-endian."""
    data = np.ascontiguousarray(numbers(lists), dtype=np.dtype(dtype).newbyteorder("<"))
    width = pa.binary(data.nbytes // len(lists))
    return pa.Array.from_buffers(width, len(lists), [None, pa.py_buffer(data)])


def decode_fixed(column: Any, dtype: str, shape: Shape) -> NumpyArray:
    """Returns the rows of a stored column of rows of one size, (rows, *shape), as a view into it.

    Raises:
        ValueError: The column holds something else.
    """
    stored = np.dtype(dtype).newbyteorder("<")
    width = stored.itemsize * prod(shape)
    if column.null_count or column.type != pa.binary(width):
        raise ValueError(f"should hold {width} bytes a row without nulls, but the data is {column.type}")
    if not len(column):
        return np.zeros((0, *shape), dtype=dtype)
    # A byte that is neither 0 nor 1 would be no boolean.
    raw = np.frombuffer(column.buffers()[1], np.uint8 if dtype == "bool" else stored)
    rows = raw[column.offset * prod(shape) :][: len(column) * prod(shape)].reshape(len(column), *shape)
    return rows != 0 if dtype == "bool" else rows.astype(dtype, copy=False)


def decode_lists(column: Any, dtype: str) -> RaggedRows:
    """Returns the rows of a stored list column as views into it.

    Raises:
        ValueError: The column holds something else.
    """
    if not is_list(column.type):
        raise ValueError(f"should hold arrays, but the data is {column.type}")
    leaf = column.flatten()
    if column.null_count or leaf.null_count:
        raise ValueError("holds nulls; write the shards again without them")
    if leaf.type != number_type(dtype):
        raise ValueError(f"should hold arrays of {dtype}, but the data is {column.type}")
    return RaggedRows(list_offsets(column), (leaf.to_numpy(zero_copy_only=False),))


def range_of(values: NumpyArray) -> tuple[Shape, Shape] | None:
    """Returns the smallest and the largest of the lengths as shapes of one dimension."""
    return None if not len(values) else ((int(values.min()),), (int(values.max()),))
