"""Column type "scalar": one number or boolean per row, with the same width as in Spark.

Dates are int32 days, and timestamps int64 microseconds, since 1970-01-01. Timestamps with a time zone count
in UTC. Decimals of up to 15 digits become float64, which keeps different decimals different.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from ringspark.pipelines.kinds.base import (
    HOLDS_NULLS,
    BatchArray,
    Encoded,
    Kind,
    Shape,
    match_dtype,
    number_type,
)
from ringspark.pipelines.kinds.values import EXACT_DIGITS, to_numbers, to_times
from ringspark.pipelines.rows import Rows

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql.types import DataType
    from typing_extensions import Self

SPARK_DTYPES = {
    "boolean": "bool",
    "tinyint": "int8",
    "smallint": "int16",
    "int": "int32",
    "bigint": "int64",
    "float": "float32",
    "double": "float64",
    "date": "int32",
    "timestamp": "int64",
    "timestamp_ntz": "int64",
}
"""Spark simple type name -> NumPy dtype of the same width."""

TEMPORAL = ("date", "timestamp", "timestamp_ntz")


@dataclass(frozen=True)
class Scalar(Kind):
    """One number or boolean per row; a batch holds (rows,).

    Attributes:
        dtype: NumPy dtype name; if it is empty, the Spark type determines it.
    """

    tag: ClassVar[str] = "scalar"
    is_choice: ClassVar[bool] = False
    dtype: str = ""

    def adopt(self, name: str, data_type: DataType) -> Self:
        simple = data_type.simpleString()
        if simple.startswith("decimal"):
            digits = int(simple[len("decimal(") :].split(",")[0])
            if digits > EXACT_DIGITS:
                raise ValueError(
                    f"column {name!r} has type {simple}, but float64 holds {EXACT_DIGITS} "
                    "digits; cast it to double first if rounding is fine, or to decimal(15, ...)"
                )
            return replace(self, dtype=match_dtype(name, self.dtype, "float64"))
        if simple not in SPARK_DTYPES:
            raise ValueError(
                f"column {name!r} has type {simple}, not a number, boolean, date or timestamp; cast it first"
            )
        return replace(self, dtype=match_dtype(name, self.dtype, SPARK_DTYPES[simple]))

    def select(self, source: SparkColumn, data_type: DataType) -> SparkColumn:
        return source.cast("double") if data_type.simpleString().startswith("decimal") else source

    def read_values(self, values: Any, source: str = "", zone: str = "UTC") -> Any:
        given = getattr(values, "type", pa.null())
        if source in TEMPORAL:
            return to_times(values, source, zone)
        return values if not source and pa.types.is_temporal(given) else to_numbers(values, self.dtype)

    @property
    def request(self) -> tuple[str, Shape]:
        return self.dtype, ()

    def stored(self, name: str) -> dict[str, Any]:
        return {name: number_type(self.dtype)}

    def encode(self, values: Any, valid: Any = None) -> Encoded:
        if pa.types.is_timestamp(values.type):
            # Spark's unit is microseconds. The cast raises on finer values, so no digit is lost.
            values = values.cast(pa.timestamp("us", values.type.tz)).view(pa.int64())
        elif pa.types.is_date32(values.type):
            values = values.view(pa.int32())
        return Encoded([values])

    def decode(self, columns: Sequence[Any]) -> Rows:
        (column,) = columns
        if column.null_count:
            raise ValueError(HOLDS_NULLS)
        if column.type != number_type(self.dtype):
            raise ValueError(f"should hold {self.dtype}, but the data is {column.type}")
        rows: Rows = column.to_numpy(zero_copy_only=False)
        return rows

    def arrays(self, name: str) -> dict[str, BatchArray]:
        return {name: BatchArray(self.dtype)}

    @property
    def row_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return self.dtype


def quote(name: str) -> str:
    """Quotes a column name for Spark, which would read a dot in it as access to a struct field."""
    return "`" + name.replace("`", "``") + "`"


def number_of(source: SparkColumn, type_name: str) -> SparkColumn:
    """Returns a Spark expression for the number that `Scalar` stores; `type_name` is the Spark type."""
    from pyspark.sql import functions as F

    if type_name.startswith("decimal"):
        return source.cast("double")
    if type_name == "date":
        return F.unix_date(source)
    if type_name == "timestamp":
        return F.unix_micros(source)
    if type_name == "timestamp_ntz":
        # Computed per field, because every shorter way depends on the session's time zone.
        micros = (F.date_part(F.lit("SECOND"), source) * F.lit(1_000_000)).cast("bigint")
        minutes = (
            F.unix_date(F.to_date(source)).cast("bigint") * 1_440 + F.hour(source) * 60 + F.minute(source)
        )
        return minutes * F.lit(60_000_000).cast("bigint") + micros
    return source
