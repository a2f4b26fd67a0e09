"""Kind "sparse": Spark ML vectors that stay sparse up to the batch, as compressed sparse rows (CSR)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from ringspark.pipelines.kinds.base import (
    BatchArray,
    Encoded,
    Kind,
    Shape,
    decode_lists,
    list_type,
    make_lists,
    number_type,
    range_of,
)
from ringspark.pipelines.kinds.vector import Vectors, check_vector, vector_struct
from ringspark.pipelines.rows import NumpyArray, RaggedRows, Rows

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql.types import DataType
    from typing_extensions import Self


@dataclass(frozen=True)
class Sparse(Kind):
    """One sparse vector per row; a batch holds `name.indptr`, `name.indices` and `name.data`.

    `scipy.sparse.csr_matrix((data, indices, indptr), shape=(rows, size))` and
    `torch.sparse_csr_tensor(indptr, indices, data, (rows, size))` take the three as they are: indptr
    int64 (rows + 1,), indices int32, data of `dtype`. A dense row among them keeps all its values.

    Attributes:
        dtype: "float32", or "float64" to keep Spark's values bit for bit.
        size: Number of elements per vector, zeros included; if None, the write finds it.
    """

    tag: ClassVar[str] = "sparse"
    dtype: str = "float32"
    size: int | None = None

    def adopt(self, name: str, data_type: DataType) -> Self:
        check_vector(self.tag, self.dtype, name, data_type)
        return self

    def select(self, source: SparkColumn, data_type: DataType) -> SparkColumn:
        return vector_struct(source, self.dtype)

    def stored(self, name: str) -> dict[str, Any]:
        return {f"{name}.indices": list_type("int32"), f"{name}.data": list_type(self.dtype)}

    def encode(self, values: Any, valid: Any = None) -> Encoded:
        vectors = Vectors(values)
        places = vectors.places().astype(np.int32)
        return Encoded(
            [
                make_lists(vectors.offsets, places, "int32"),
                make_lists(vectors.offsets, vectors.numbers, self.dtype),
            ],
            range_of(vectors.sizes if valid is None else vectors.sizes[valid]),
        )

    def settle(self, name: str, shapes: tuple[Shape, Shape] | None, nullable: bool) -> Self:
        (low,), (high,) = shapes or ((0,), (0,))
        if low != high:
            raise ValueError(
                f"column {name!r} has vectors of size {low} to {high}; every row needs the same size"
            )
        if self.size is not None and self.size != low:
            raise ValueError(
                f"column {name!r} has vectors of size {low} where size={self.size} was asked for"
            )
        return replace(self, size=low)

    def decode(self, columns: Sequence[Any]) -> Rows:
        indices, data = (
            decode_lists(column, dtype) for column, dtype in zip(columns, ("int32", self.dtype), strict=True)
        )
        if not np.array_equal(indices.offsets, data.offsets):
            raise ValueError("has other numbers of indices than of values")
        return RaggedRows(data.offsets, (*indices.parts, *data.parts))

    def finish(self, name: str, rows: RaggedRows) -> dict[str, NumpyArray]:
        compact = rows.compact()
        indices, data = compact.parts
        return {f"{name}.indptr": compact.offsets, f"{name}.indices": indices, f"{name}.data": data}

    def batch_names(self, name: str) -> tuple[str, ...]:
        return f"{name}.indptr", f"{name}.indices", f"{name}.data"

    def arguments(self, name: str) -> tuple[str, ...]:
        return f"{name}.indices", f"{name}.indptr", f"{name}.data"

    @property
    def selected(self) -> Any:
        parts = {"indices": pa.list_(pa.int32()), "values": pa.list_(number_type(self.dtype))}
        return pa.struct({"size": pa.int32(), **parts})

    @property
    def num_ids(self) -> int | None:
        return self.size

    def arrays(self, name: str) -> dict[str, BatchArray]:
        return {
            f"{name}.indptr": BatchArray("int64", offsets=f"{name}.indptr"),
            f"{name}.indices": BatchArray("int32", offsets=f"{name}.indptr"),
            f"{name}.data": BatchArray(self.dtype, offsets=f"{name}.indptr"),
        }

    @property
    def row_bytes(self) -> int:
        return 32 * self.value_bytes  # the same guess as for ragged rows

    @property
    def value_bytes(self) -> int:
        return 4 + int(np.dtype(self.dtype).itemsize)

    def __str__(self) -> str:
        return f"{self.dtype}[{self.size} sparse]"
