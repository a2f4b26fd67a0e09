"""Column type "sparse": Spark ML vectors that stay sparse in the batch, as compressed sparse rows (CSR)."""

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
)
from ringspark.pipelines.kinds.vector import Vectors, check_vector, common_size, vector_struct, vector_values
from ringspark.pipelines.rows import NumpyArray, RaggedRows, Rows

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql.types import DataType
    from typing_extensions import Self


@dataclass(frozen=True)
class Sparse(Kind):
    """One sparse vector per row; a batch holds `name.indptr`, `name.indices` and `name.data`.

    The three arrays can be passed unchanged to `scipy.sparse.csr_matrix((data, indices, indptr), shape=(rows,
    size))` and `torch.sparse_csr_tensor(indptr, indices, data, (rows, size))`. indptr is int64 (rows + 1,),
    indices is int32, and data has `dtype`. A dense row keeps all its values, also zeros.

    Attributes:
        dtype: "float32", or "float64" to keep Spark's values bit for bit.
        size: Elements per vector, including zeros; None until the write has found it.
    """

    tag: ClassVar[str] = "sparse"
    suffixes: ClassVar[tuple[str, ...]] = (".indptr", ".indices", ".data")
    dtype: str = "float32"
    size: int | None = None

    def adopt(self, name: str, data_type: DataType) -> Self:
        check_vector(self.tag, self.dtype, name, data_type)
        return self

    def select(self, source: SparkColumn, data_type: DataType) -> SparkColumn:
        return vector_struct(source, self.dtype)

    def read_values(self, values: Any, source: str = "", zone: str = "UTC") -> Any:
        return vector_values(values, self.dtype)

    def check_shapes(self, shapes: tuple[Shape, Shape] | None) -> None:
        for (size,) in shapes or ():
            if size != self.size:
                raise ValueError(
                    f"has a vector of size {size} in transform, but the model was trained on size "
                    f"{self.size}; give a column that was made as in the training"
                )

    def stored(self, name: str) -> dict[str, Any]:
        return {f"{name}.indices": list_type("int32"), f"{name}.data": list_type(self.dtype)}

    def encode(self, values: Any, valid: Any = None) -> Encoded:
        vectors = Vectors(values)
        indices = make_lists(vectors.offsets, vectors.indices().astype(np.int32), "int32")
        data = make_lists(vectors.offsets, vectors.numbers, self.dtype)
        return Encoded([indices, data], vectors.size_range(valid))

    def settle(self, name: str, shapes: tuple[Shape, Shape] | None, nullable: bool) -> Self:
        size = common_size(name, shapes)
        if self.size is not None and self.size != size:
            raise ValueError(f"column {name!r} has vectors of size {size}; remove size={self.size} of Sparse")
        return replace(self, size=size)

    def decode(self, columns: Sequence[Any]) -> Rows:
        indices, data = (
            decode_lists(column, dtype) for column, dtype in zip(columns, ("int32", self.dtype), strict=True)
        )
        if not np.array_equal(indices.offsets, data.offsets):
            raise ValueError("has rows whose number of indices differs from their number of values")
        return RaggedRows(data.offsets, (*indices.parts, *data.parts))

    def finish(self, name: str, rows: RaggedRows) -> dict[str, NumpyArray]:
        compact = rows.compact()
        indices, data = compact.parts
        return {f"{name}.indptr": compact.offsets, f"{name}.indices": indices, f"{name}.data": data}

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
        dtypes = ("int64", "int32", self.dtype)
        return {
            array: BatchArray(dtype, offsets=f"{name}.indptr")
            for array, dtype in zip(self.batch_names(name), dtypes, strict=True)
        }

    @property
    def row_bytes(self) -> int:
        return 32 * self.value_bytes  # the same guess as for ragged rows

    @property
    def value_bytes(self) -> int:
        return 4 + np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.dtype}[{self.size} sparse]"
