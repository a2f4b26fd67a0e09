"""Columns of a set of shards, derived from a Spark schema.

Numbers keep their type: an int64 of the DataFrame, such as 16,777,217, is the same int64 in the batch. Only
vectors become float32, unless the user asks for `Vector("float64")`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from ringspark.pipelines.kinds import Array, Kind, Scalar, Struct, Vector, kind_from_json
from ringspark.pipelines.kinds.array import element_dtype
from ringspark.pipelines.kinds.image import is_spark_image
from ringspark.pipelines.kinds.scalar import SPARK_DTYPES
from ringspark.pipelines.kinds.scalar import quote as quote
from ringspark.pipelines.kinds.vector import is_vector
from ringspark.pipelines.typed_json import record

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import DataType, StructType

MASK = ".isnull"
"""Suffix of the boolean column that `write_shards` adds for a column whose nulls are kept."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a set of shards.

    Attributes:
        name: Name of the column in the DataFrame, and prefix of its arrays in a batch.
        kind: Column type: how the column is stored and read.
        source: The column's type in Spark, as a simple type string.
    """

    name: str
    kind: Kind
    source: str = ""

    @property
    def is_dense(self) -> bool:
        """Whether a batch holds the column as a single array called `name`, with an entry per row."""
        return self.name in self.kind.batch_names(self.name)

    @property
    def dtype(self) -> str:
        """NumPy dtype name of the column in a batch, if it is dense."""
        return self.kind.arrays(self.name)[self.name].dtype

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row in a batch, if the column is dense."""
        return self.kind.arrays(self.name)[self.name].shape

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "source": self.source, **self.kind.to_json()}

    @staticmethod
    def from_values(data: Mapping[str, Any]) -> Column:
        own = {key: data[key] for key in ("name", "source") if key in data}
        kind = kind_from_json({key: value for key, value in data.items() if key not in own})
        return record(Column, own | {"kind": kind})


def columns_from_spark(schema: StructType, choices: Mapping[str, Kind] | None = None) -> tuple[Column, ...]:
    """Derives columns from a Spark schema, on the driver and without a job.

    Args:
        schema: The DataFrame's schema.
        choices: Column types that the user chose, by column name.

    Raises:
        ValueError: A Spark type cannot be used, or needs an entry in `choices`. An entry does not fit its
            column, or the column does not exist. Or two columns have the same name.
    """
    choices = dict(choices or {})
    for name, kind in choices.items():
        if name not in schema.names:
            near = get_close_matches(name, schema.names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the DataFrame has {schema.names}"
            raise ValueError(f"columns has the key {name!r}, but the DataFrame has no such column; {hint}")
        if not isinstance(kind, Kind):
            raise ValueError(
                f"columns[{name!r}] must be a column type such as Vocabulary() or Sparse(), got {kind!r}"
            )
    columns = []
    for field in schema.fields:
        kind = choices.get(field.name) or _default_kind(field.name, field.dataType)
        kind = kind.adopt(field.name, field.dataType)
        columns.append(Column(name=field.name, kind=kind, source=field.dataType.simpleString()))
    check_names([column.name for column in columns])
    return tuple(columns)


def check_names(names: Iterable[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"two columns are named {name!r}; rename one with df.withColumnRenamed")


def check_masks(names: Sequence[str]) -> None:
    for name in names:
        owner = name.removesuffix(MASK)
        if owner != name and owner in names:
            raise ValueError(
                f"column {name!r} has the name of the null mask that write_shards adds for {owner!r}; "
                f"rename it, e.g. df.withColumnRenamed({name!r}, {owner + '_missing'!r})"
            )


def is_case_sensitive(spark: SparkSession) -> bool:
    return str(spark.conf.get("spark.sql.caseSensitive", "false")).lower() == "true"


def check_frame(value: Any, subject: str) -> None:
    # Not by isinstance: before Spark 4, the DataFrames of Classic and Connect share no base class.
    if not hasattr(value, "mapInArrow"):
        package, name = type(value).__module__.partition(".")[0], type(value).__name__
        given = name if package == "builtins" else f"{package} {name}"
        is_path = isinstance(value, (str, os.PathLike))
        remedy = "read the file with spark.read" if is_path else "make one with spark.createDataFrame"
        raise ValueError(f"{subject} takes a Spark DataFrame, got {given}; {remedy}")


def check_batch(df: Any, subject: str) -> None:
    """Raises ValueError for anything but a DataFrame of rows that exist already."""
    check_frame(df, subject)
    if df.isStreaming:
        raise ValueError(f"{subject} takes a batch DataFrame, got a streaming one; call it in foreachBatch")


def _default_kind(name: str, data_type: DataType) -> Kind:
    if is_vector(data_type):
        return Vector()
    simple = data_type.simpleString()
    if simple in SPARK_DTYPES or simple.startswith("decimal"):
        return Scalar()
    family = data_type.typeName().split("(")[0].split(" ")[0]
    if family == "array":
        element_dtype(name, data_type)
        return Array()
    if family in ("string", "varchar", "char"):
        remedy = (
            "index it with StringIndexer first, or pass one of these to write_shards: "
            f"columns={{{name!r}: Vocabulary()}} gives each string its own id, columns={{{name!r}: "
            f"HashBuckets(1024)}} hashes it, Tokens.of(tokenizer) splits it into token ids"
        )
    elif family == "binary":
        remedy = (
            "decode it into an array of numbers first, or pass to write_shards: "
            f"columns={{{name!r}: Image(height, width)}} for encoded images, or Binary('npy', shape=...)"
        )
    elif is_spark_image(data_type):
        remedy = f"set its image size: pass columns={{{name!r}: Image(height, width)}} to write_shards"
    elif family == "struct":
        return Struct()
    elif family == "map":
        remedy = "select its values as separate columns first"
    else:
        remedy = "turn it into numbers first, or drop it with df.drop"
    raise ValueError(
        f"column {name!r} has type {simple}, which networks cannot take as it is "
        f"(they take numbers, booleans, dates, structs of these, arrays and vectors); {remedy}"
    )
