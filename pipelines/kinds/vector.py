"""Column type "vector": Spark ML vectors as dense arrays. No Python code runs per row.

A column may contain both dense and sparse rows. Both are passed to Python as one struct. Its arrays are never
null, because null arrays would take Spark several times as long.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringspark.pipelines.kinds.array import Array
from ringspark.pipelines.kinds.base import Encoded, Shape, list_offsets, make_lists, number_type, range_of
from ringspark.pipelines.kinds.values import to_list
from ringspark.pipelines.nulls import fill_nulls
from ringspark.pipelines.rows import NumpyArray

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql.types import DataType
    from typing_extensions import Self

SPARK_FLOATS = {"float32": "float", "float64": "double"}

_PARTS = pa.struct({"size": pa.int32(), "indices": pa.list_(pa.int32()), "values": pa.list_(pa.float64())})

# Longest vector whose zeros are stored.
MAX_DENSE_SIZE = 1 << 16


@dataclass(frozen=True)
class Vector(Array):
    """One dense vector per row; a batch holds (rows, size).

    Attributes:
        dtype: "float32", or "float64" to keep Spark's values bit for bit.
    """

    tag: ClassVar[str] = "vector"
    dtype: str = "float32"

    def adopt(self, name: str, data_type: DataType) -> Self:
        check_vector(self.tag, self.dtype, name, data_type)
        return replace(self)

    def select(self, source: SparkColumn, data_type: DataType) -> SparkColumn:
        return vector_struct(source, self.dtype)

    def read_values(self, values: Any, source: str = "", zone: str = "UTC") -> Any:
        return vector_values(values, self.dtype)

    def encode(self, values: Any, valid: Any = None) -> Encoded:
        vectors = Vectors(values)
        shapes = vectors.size_range(valid)
        offsets, leaf = vectors.offsets, vectors.numbers
        if not vectors.is_dense.all():
            if vectors.sizes.max() > MAX_DENSE_SIZE:
                raise ValueError(
                    f"holds sparse vectors of size {vectors.sizes.max()}, too many zeros to store; keep them "
                    "sparse with columns={its name: Sparse()} and a network that begins with "
                    "nn.EmbeddingBag, or make fewer features, e.g. by HashingTF(numFeatures=4096)"
                )
            offsets = np.concatenate([[0], np.cumsum(vectors.sizes, dtype=np.int64)])
            dense = np.zeros(int(offsets[-1]), dtype=self.dtype)
            dense[np.repeat(offsets[:-1], np.diff(vectors.offsets)) + vectors.indices()] = leaf
            leaf = dense
        return Encoded([self.pack(make_lists(offsets, leaf, self.dtype), shapes, valid)], shapes)

    def settle(self, name: str, shapes: tuple[Shape, Shape] | None, nullable: bool) -> Self:
        common_size(name, shapes)
        return super().settle(name, shapes, nullable)


class Vectors:
    """A batch of vectors in the form of `vector_struct`.

    `sizes` include the zeros, which `numbers` may leave out.
    """

    def __init__(self, values: Any) -> None:
        sizes, self._indices, numbers = values.flatten()
        self.sizes: NumpyArray = sizes.to_numpy(zero_copy_only=False)
        self.offsets = list_offsets(numbers)
        self.numbers: NumpyArray = numbers.flatten().to_numpy()
        # A sparse row has an index per number, a dense row has none.
        self.is_dense: NumpyArray = (np.diff(list_offsets(self._indices)) == 0) & (
            np.diff(self.offsets) == self.sizes
        )

    def size_range(self, valid: Any) -> tuple[Shape, Shape] | None:
        return range_of(self.sizes if valid is None else self.sizes[valid])

    def indices(self) -> NumpyArray:
        counts = np.diff(self.offsets)
        if not self.is_dense.any():
            return np.asarray(self._indices.flatten().to_numpy(), dtype=np.int64)
        indices: NumpyArray = np.arange(len(self.numbers)) - np.repeat(self.offsets[:-1], counts)
        indices[np.repeat(~self.is_dense, counts)] = self._indices.flatten().to_numpy()
        return indices


def vector_values(values: Any, dtype: str) -> Any:
    """Returns the structs of `vector_struct` for vectors in Spark's storage format, in JSON or as lists."""
    if not (isinstance(values, pa.Array) and pa.types.is_struct(values.type)):
        try:
            values = pa.array([_parts_of(value) for value in to_list(values)], _PARTS, from_pandas=True)
        except (pa.ArrowException, OverflowError) as error:
            raise ValueError(f"holds a value that is not a vector of numbers ({error})") from None
    names = [field.name for field in values.type]
    if not {"size", "indices", "values"} <= set(names):
        raise ValueError(f"should hold vectors, but the data is {values.type}")
    parts = dict(zip(names, values.flatten(), strict=True))
    # Arrow raises no error here, and rounds like Spark: a double beyond the range becomes infinite.
    data = parts["values"].cast(pa.list_(number_type(dtype)), safe=False)
    size = pc.coalesce(parts["size"], pc.list_value_length(data)).cast(pa.int32())
    return pa.StructArray.from_arrays(
        [pc.fill_null(size, 0), fill_nulls(parts["indices"]), data],
        names=["size", "indices", "values"],
        mask=values.is_null(),
    )


def _parts_of(value: Any) -> dict[str, Any] | None:
    if value is None or (isinstance(value, dict) and "values" in value):
        return value
    if hasattr(value, "indices"):  # a sparse vector of Spark
        return {"size": value.size, "indices": value.indices, "values": value.values}
    return {"values": value.toArray() if hasattr(value, "toArray") else value}


def common_size(name: str, shapes: tuple[Shape, Shape] | None) -> int:
    (low,), (high,) = shapes or ((0,), (0,))
    if low != high:
        raise ValueError(
            f"column {name!r} has vectors of size {low} to {high}; give every row a vector of the same size"
        )
    return low


def check_vector(tag: str, dtype: str, name: str, data_type: DataType) -> None:
    if dtype not in SPARK_FLOATS:
        raise ValueError(f"dtype of {tag} column {name!r} must be float32 or float64, got {dtype!r}")
    if not is_vector(data_type):
        raise ValueError(
            f"column {name!r} has type {data_type.simpleString()}, not a vector; make one by VectorAssembler"
        )


def is_vector(data_type: DataType) -> bool:
    # Compared by name, so pyspark.ml need not be imported. Spark Connect creates the same class.
    return type(data_type).__name__ == "VectorUDT"


def vector_struct(source: SparkColumn, dtype: str) -> SparkColumn:
    """Returns a struct of size, indices (empty for a dense vector) and values. A null vector gives null."""
    from pyspark.sql import functions as F

    inside = F.unwrap_udt(source)
    values = inside.getField("values")
    if dtype != "float64":
        values = values.cast(f"array<{SPARK_FLOATS[dtype]}>")
    parts = F.struct(
        F.coalesce(inside.getField("size"), F.size(values)).alias("size"),
        F.coalesce(inside.getField("indices"), F.array().cast("array<int>")).alias("indices"),
        values.alias("values"),
    )
    return F.when(source.isNotNull(), parts)


def canonical_vector(source: SparkColumn) -> SparkColumn:
    """Returns a Spark expression with equal values for equal vectors, whether they are dense or sparse."""
    from pyspark.sql import functions as F

    inside = F.unwrap_udt(source)
    values = inside.getField("values")
    size = F.coalesce(inside.getField("size"), F.size(values))
    every = F.when(size > 0, F.sequence(F.lit(0), size - 1)).otherwise(F.array().cast("array<int>"))
    pairs = F.zip_with(
        F.coalesce(inside.getField("indices"), every),
        values,
        lambda index, value: F.struct(index.alias("index"), value.alias("value")),
    )
    return F.struct(
        size.alias("size"), F.filter(pairs, lambda pair: pair.getField("value") != 0).alias("pairs")
    )
