"""Which columns can be trained on, and how they look in Spark, Arrow and NumPy.

One table (`SPARK_DTYPES`) decides. A column is a scalar or a fixed-length array
of booleans or numbers; vectors become float32 arrays; everything else is
refused on the driver, by name, with the remedy. Nothing is ever cast: the
int64 16,777,217 in the DataFrame is the int64 16,777,217 in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql.types import DataType, StructType

SPARK_DTYPES = {
    "boolean": "bool",
    "tinyint": "int8",
    "smallint": "int16",
    "int": "int32",
    "bigint": "int64",
    "float": "float32",
    "double": "float64",
}
"""Spark's simple type names and the NumPy dtypes of the same width."""

DTYPES = tuple(SPARK_DTYPES.values())

_REMEDIES = {
    "string": "index it with StringIndexer first",
    "varchar": "index it with StringIndexer first",
    "char": "index it with StringIndexer first",
    "date": "turn it into numbers first, e.g. with F.dayofyear or F.unix_date",
    "timestamp": "turn it into numbers first, e.g. with F.unix_timestamp or F.hour",
    "timestamp_ntz": "turn it into numbers first, e.g. with F.unix_timestamp or F.hour",
    "decimal": "cast it to double first",
    "struct": "select its fields as columns of their own first",
    "map": "select its values as columns of their own first",
    "binary": "decode it into an array of numbers first",
    "array": "make it an array of numbers first, e.g. with F.flatten or F.transform",
}


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a batch.

    Attributes:
        name: The name in the DataFrame, the Parquet files and the batch.
        kind: "scalar" for shape (rows,), "array" for shape (rows, length).
        dtype: NumPy dtype name, one of `DTYPES`.
        length: Elements per row of an array; None for a scalar, and for an array not written yet.
    """

    name: str
    kind: Literal["scalar", "array"]
    dtype: str
    length: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("scalar", "array") or self.dtype not in DTYPES:
            raise ValueError(
                f"column {self.name!r} has an unknown kind or dtype: {self.kind!r} of {self.dtype!r}"
            )

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row: () or (length,)."""
        if self.kind == "scalar":
            return ()
        assert self.length is not None, f"the length of column {self.name!r} is not known yet"
        return (self.length,)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in NumPy."""
        return int(np.dtype(self.dtype).itemsize * np.prod(self.row_shape, dtype=np.int64))

    def to_json(self) -> dict[str, Any]:
        """Returns the column as JSON values."""
        return {"name": self.name, "kind": self.kind, "dtype": self.dtype, "length": self.length}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Column:
        """Reads what `to_json` returned."""
        return Column(name=data["name"], kind=data["kind"], dtype=data["dtype"], length=data["length"])


def columns_from_spark(schema: StructType) -> tuple[Column, ...]:
    """Maps a Spark schema to columns. Runs on the driver and starts no job.

    Raises:
        ValueError: A column has a type that cannot be trained on, or two share a name.
    """
    columns = tuple(_column_from_spark(field.name, field.dataType) for field in schema.fields)
    seen: set[str] = set()
    for column in columns:
        if column.name.lower() in seen:
            raise ValueError(f"two columns are named {column.name!r}; rename one with df.withColumnRenamed")
        seen.add(column.name.lower())
    return columns


def select_expression(column: Column, data_type: DataType) -> SparkColumn:
    """Returns the Spark expression that stores `column`: itself, or a vector as a float32 array."""
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions as F

    source = F.col(quote(column.name))
    if not _is_vector(data_type):
        return source
    # vector_to_array throws on a null vector, deep in an executor. Nulls must come through: the
    # driver reports them with the column's name and their number.
    return F.when(source.isNotNull(), vector_to_array(source, "float32"))


def quote(name: str) -> str:
    """Quotes a column name for Spark: a dot in it does not mean a struct field."""
    return "`" + name.replace("`", "``") + "`"


def arrow_type(column: Column) -> Any:
    """Returns the Arrow type that `column` is stored as."""
    scalar = pa.bool_() if column.dtype == "bool" else pa.from_numpy_dtype(np.dtype(column.dtype))
    if column.kind == "scalar":
        return scalar
    # Elements that cannot be null carry no definition levels: smaller files, faster reads.
    return pa.list_(pa.field("element", scalar, nullable=False))


def to_numpy(data: Any, column: Column) -> npt.NDArray[Any]:
    """Converts an Arrow column to NumPy, without a copy where Arrow allows it.

    Arrays are flattened and reshaped, never walked row by row.

    Args:
        data: `pyarrow.Array` or `pyarrow.ChunkedArray` of the column.
        column: What it must hold.

    Returns:
        Shape (rows,) for a scalar column, (rows, length) for an array. May be read-only.

    Raises:
        ValueError: The data has nulls, another dtype or another length than `column` says.
    """
    chunks = data.chunks if isinstance(data, pa.ChunkedArray) else [data]
    parts = [_chunk_to_numpy(chunk, column) for chunk in chunks if len(chunk)]
    if not parts:
        return np.zeros((0, *column.row_shape), dtype=column.dtype)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _chunk_to_numpy(chunk: Any, column: Column) -> npt.NDArray[Any]:
    values = chunk
    if column.kind == "array":
        if not (pa.types.is_list(chunk.type) or pa.types.is_large_list(chunk.type)):
            raise ValueError(f"column {column.name!r} should hold arrays, but the data is {chunk.type}")
        values = chunk.flatten()
    if chunk.null_count or values.null_count:
        raise ValueError(f"column {column.name!r} holds nulls; write the shards again without them")
    array = cast("npt.NDArray[Any]", values.to_numpy(zero_copy_only=False))
    if array.dtype != np.dtype(column.dtype):
        raise ValueError(f"column {column.name!r} should hold {column.dtype}, but the data is {chunk.type}")
    if column.kind == "scalar":
        return array
    if len(array) != len(chunk) * (column.length or 0):
        raise ValueError(
            f"column {column.name!r} should hold arrays of length {column.length}, but lengths vary"
        )
    return array.reshape(len(chunk), *column.row_shape)


def _column_from_spark(name: str, data_type: DataType) -> Column:
    if _is_vector(data_type):
        return Column(name=name, kind="array", dtype="float32")
    simple = data_type.simpleString()
    if simple in SPARK_DTYPES:
        return Column(name=name, kind="scalar", dtype=SPARK_DTYPES[simple])
    element = getattr(data_type, "elementType", None)
    if element is not None and element.simpleString() in SPARK_DTYPES:
        return Column(name=name, kind="array", dtype=SPARK_DTYPES[element.simpleString()])
    family = data_type.typeName().split("(")[0].split(" ")[0]
    remedy = _REMEDIES.get(family, "turn it into numbers first, or drop it with df.drop")
    raise ValueError(
        f"column {name!r} has type {simple}, which cannot be trained on "
        f"(numbers, booleans, arrays of them and vectors can); {remedy}"
    )


def _is_vector(data_type: DataType) -> bool:
    # By name, so that pyspark.ml need not be imported; Spark Connect rebuilds the same class.
    return type(data_type).__name__ == "VectorUDT"
