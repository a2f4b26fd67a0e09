"""Kind "vector": Spark ML vectors as dense arrays, without a pass through Python rows.

Spark hands a vector over as a struct of type, size, indices and values; a
column may mix dense and sparse rows (`VectorAssembler` picks the smaller for
each row), and both are handled here by whole arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ringspark.pipelines.kinds.array import Array
from ringspark.pipelines.kinds.base import Encoded, Shape, list_offsets, make_lists
from ringspark.pipelines.rows import Array as NumpyArray

if TYPE_CHECKING:
    from pyspark.sql.types import DataType
    from typing_extensions import Self

FLOATS = ("float32", "float64")

# Zeros written out for a sparse row; beyond this, storing them is hardly what anyone wants.
MAX_DENSE_SIZE = 1 << 16


@dataclass(frozen=True)
class Vector(Array):
    """A vector a row, dense; a batch holds (rows, size).

    Attributes:
        dtype: "float32", or "float64" to keep what Spark has bit for bit.
    """

    tag: ClassVar[str] = "vector"
    dtype: str = "float32"

    def adopt(self, name: str, data_type: DataType) -> Self:
        check_vector(self.tag, self.dtype, name, data_type)
        return replace(self)

    def encode(self, values: Any, valid: Any = None) -> Encoded:
        is_dense, sizes, indices, numbers = vector_parts(values)
        counted = sizes if valid is None else sizes[valid]
        shapes: tuple[Shape, Shape] | None = None
        if len(counted):
            shapes = ((int(counted.min()),), (int(counted.max()),))
        offsets, leaf = list_offsets(numbers), numbers.flatten().to_numpy().astype(self.dtype)
        if not is_dense.all():
            leaf = _dense(is_dense, sizes, indices, offsets, leaf)
            offsets = np.concatenate([[0], np.cumsum(sizes)])
        return Encoded([make_lists(offsets, leaf, self.dtype)], shapes)


def check_vector(tag: str, dtype: str, name: str, data_type: DataType) -> None:
    """Refuses other Spark types and dtypes for a kind of vectors."""
    if dtype not in FLOATS:
        raise ValueError(f"dtype of {tag} column {name!r} must be float32 or float64, got {dtype!r}")
    if not is_vector(data_type):
        raise ValueError(f"column {name!r} has type {data_type.simpleString()}, which is no vector")


def is_vector(data_type: DataType) -> bool:
    """Whether a Spark type is that of ML vectors."""
    # By name, so that pyspark.ml need not be imported; Spark Connect rebuilds the same class.
    return type(data_type).__name__ == "VectorUDT"


def vector_parts(values: Any) -> tuple[NumpyArray, NumpyArray, Any, Any]:
    """Takes Spark's struct of vectors apart.

    Returns:
        Whether each row is dense, its size, and Arrow lists without nulls of indices and of values.
    """
    kind, size, indices, numbers = values.flatten()
    is_dense = kind.to_numpy(zero_copy_only=False) == 1
    offsets = list_offsets(numbers)
    sizes = np.diff(offsets)
    if not is_dense.all():
        given = size.fill_null(0).to_numpy(zero_copy_only=False)
        sizes = np.where(is_dense, sizes, given)
    return is_dense, sizes.astype(np.int64), indices, numbers


def _dense(
    is_dense: NumpyArray, sizes: NumpyArray, indices: Any, offsets: NumpyArray, leaf: NumpyArray
) -> NumpyArray:
    """Writes out the zeros of sparse rows."""
    if len(sizes) and sizes.max() > MAX_DENSE_SIZE:
        raise ValueError(
            f"holds sparse vectors of size {sizes.max()}, too many zeros to store; "
            "pass columns={...: Sparse()} to write_shards to keep it sparse"
        )
    starts = np.cumsum(sizes) - sizes
    counts = np.diff(offsets)
    # A dense row's place of a value is its own position; a sparse row's is its index.
    places = np.arange(len(leaf)) - np.repeat(offsets[:-1], counts)
    places[np.repeat(~is_dense, counts)] = indices.flatten().to_numpy()
    dense = np.zeros(int(sizes.sum()), dtype=leaf.dtype)
    dense[np.repeat(starts, counts) + places] = leaf
    return dense
