"""Kind "vector": Spark ML vectors as dense arrays, without a pass through Python rows.

A column may mix dense and sparse rows (`VectorAssembler` picks the smaller for
each row). The values of dense rows are taken from the vector's own array,
sparse rows are written out by Spark's `vector_to_array`, both inside the JVM:
handing over the vector's struct, whose arrays are null in half of the rows,
takes several times as long.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from ringspark.pipelines.kinds.array import Array
from ringspark.pipelines.spark_errors import refusal

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql.types import DataType
    from typing_extensions import Self

SPARK_FLOATS = {"float32": "float", "float64": "double"}

# Zeros written out for a sparse row; beyond this, storing them is hardly what anyone wants.
MAX_DENSE_SIZE = 1 << 16
_DENSE = 1


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

    def select(self, source: SparkColumn, data_type: DataType) -> SparkColumn:
        from pyspark.ml.functions import vector_to_array
        from pyspark.sql import functions as F

        kind, size, _, values = vector_parts(source, self.dtype)
        too_large = refusal(
            F.concat(
                F.lit("a vector column holds sparse vectors of size "),
                size,
                F.lit(", too many zeros to store; pass columns={its name: Sparse()} to write_shards"),
            )
        )
        # vector_to_array throws on a null vector, deep in an executor, so it must not see one.
        return (
            F.when(kind == _DENSE, values)
            .when(size > MAX_DENSE_SIZE, too_large.cast(values_type(self.dtype)))
            .when(source.isNotNull(), vector_to_array(source, self.dtype))
        )


def check_vector(tag: str, dtype: str, name: str, data_type: DataType) -> None:
    """Refuses other Spark types and dtypes for a kind of vectors."""
    if dtype not in SPARK_FLOATS:
        raise ValueError(f"dtype of {tag} column {name!r} must be float32 or float64, got {dtype!r}")
    if not is_vector(data_type):
        raise ValueError(f"column {name!r} has type {data_type.simpleString()}, which is no vector")


def is_vector(data_type: DataType) -> bool:
    """Whether a Spark type is that of ML vectors."""
    # By name, so that pyspark.ml need not be imported; Spark Connect rebuilds the same class.
    return type(data_type).__name__ == "VectorUDT"


def values_type(dtype: str) -> str:
    """Returns Spark's type of the values of vectors."""
    return f"array<{SPARK_FLOATS[dtype]}>"


def vector_parts(source: SparkColumn, dtype: str) -> tuple[Any, Any, Any, Any]:
    """Returns type (1 for dense), size, indices and values of a vector as Spark expressions.

    Size and indices are null for a dense vector; all four are null for a null one.
    """
    from pyspark.sql import functions as F

    inside = F.unwrap_udt(source)
    values = inside.getField("values")
    if dtype != "float64":
        values = values.cast(values_type(dtype))
    return inside.getField("type"), inside.getField("size"), inside.getField("indices"), values
