"""Kind "vector": Spark ML vectors as dense arrays, without a pass through Python rows.

A column may mix dense and sparse rows (`VectorAssembler` picks the smaller form
for each row). Both forms cross to Python unchanged, and Python makes whole
batches dense at once. No array inside the struct that crosses is ever null:
null arrays cost Spark several times as long.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ringspark.pipelines.kinds.array import Array
from ringspark.pipelines.kinds.base import Encoded, Shape, list_offsets, make_lists, range_of
from ringspark.pipelines.rows import NumpyArray

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql.types import DataType
    from typing_extensions import Self

SPARK_FLOATS = {"float32": "float", "float64": "double"}

# The longest vector whose zeros are written out; hardly anyone wants to store more of them.
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

    def encode(self, values: Any, valid: Any = None) -> Encoded:
        vectors = Vectors(values)
        shapes = range_of(vectors.sizes if valid is None else vectors.sizes[valid])
        offsets, leaf = vectors.offsets, vectors.numbers
        if not vectors.is_dense.all():
            if vectors.sizes.max() > MAX_DENSE_SIZE:
                raise ValueError(
                    f"holds sparse vectors of size {vectors.sizes.max()}, too many zeros to store; for a "
                    "training keep them sparse by columns={its name: Sparse()}, for a network that begins "
                    "with nn.EmbeddingBag, or make fewer features, e.g. by HashingTF(numFeatures=4096)"
                )
            offsets = np.concatenate([[0], np.cumsum(vectors.sizes, dtype=np.int64)])
            dense = np.zeros(int(offsets[-1]), dtype=self.dtype)
            dense[np.repeat(offsets[:-1], np.diff(vectors.offsets)) + vectors.places()] = leaf
            leaf = dense
        return Encoded([self.packed(make_lists(offsets, leaf, self.dtype), shapes, valid)], shapes)

    def settle(self, name: str, shapes: tuple[Shape, Shape] | None, nullable: bool) -> Self:
        (low,), (high,) = shapes or ((0,), (0,))
        if low != high:
            raise ValueError(
                f"column {name!r} has vectors of size {low} to {high}; every row needs the same size"
            )
        return super().settle(name, shapes, nullable)


class Vectors:
    """The parts of a batch of vectors in the form that `vector_struct` gives.

    Attributes:
        sizes: (rows,) number of elements of each vector, zeros included.
        offsets: (rows + 1,) index in `numbers` at which each row starts.
        numbers: The stored numbers of all rows, end to end.
        is_dense: (rows,) whether a row stores all its elements.
    """

    def __init__(self, values: Any) -> None:
        sizes, self._indices, numbers = values.flatten()
        self.sizes: NumpyArray = sizes.to_numpy(zero_copy_only=False)
        self.offsets = list_offsets(numbers)
        self.numbers: NumpyArray = numbers.flatten().to_numpy()
        # A sparse row has an index for each number, a dense row has none.
        self.is_dense: NumpyArray = (np.diff(list_offsets(self._indices)) == 0) & (
            np.diff(self.offsets) == self.sizes
        )

    def places(self) -> NumpyArray:
        """Returns, for each number, its index within its vector, as int64."""
        counts = np.diff(self.offsets)
        if not self.is_dense.any():
            return np.asarray(self._indices.flatten().to_numpy(), dtype=np.int64)
        places: NumpyArray = np.arange(len(self.numbers)) - np.repeat(self.offsets[:-1], counts)
        places[np.repeat(~self.is_dense, counts)] = self._indices.flatten().to_numpy()
        return places


def check_vector(tag: str, dtype: str, name: str, data_type: DataType) -> None:
    """Refuses a Spark type that is not a vector, and a dtype other than float32 and float64."""
    if dtype not in SPARK_FLOATS:
        raise ValueError(f"dtype of {tag} column {name!r} must be float32 or float64, got {dtype!r}")
    if not is_vector(data_type):
        raise ValueError(f"column {name!r} has type {data_type.simpleString()}, which is no vector")


def is_vector(data_type: DataType) -> bool:
    """Whether a Spark type is the type of ML vectors."""
    # Compared by name, so that pyspark.ml need not be imported; Spark Connect rebuilds the same class.
    return type(data_type).__name__ == "VectorUDT"


def vector_struct(source: SparkColumn, dtype: str) -> SparkColumn:
    """Returns a struct of size, indices (none for a dense vector) and values; null for a null vector."""
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
    """Returns a Spark expression that is equal for equal vectors, dense or sparse: size and non-zeros."""
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
