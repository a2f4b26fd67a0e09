"""Checks of a DataFrame's schema, on the driver, before any job starts."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql.types import BinaryType, DataType, StringType, StructType

from ringspark.estimators.names import nearest
from ringspark.pipelines.columns import columns_from_spark

# `fit` and `transform` take columns as they are; they do not have the choices of `write_shards`.
_REMEDIES: dict[type[DataType], str] = {
    StringType: "index it with StringIndexer first, or hash it with F.pmod(F.xxhash64(column), F.lit(1024))",
    BinaryType: "decode it into an array of numbers first",
}


def check_columns_exist(schema: StructType, columns: dict[str, str]) -> None:
    """Refuses a Param that names a column which the DataFrame lacks.

    Args:
        columns: Column name -> name of the Param that holds it.

    Raises:
        ValueError: A column is missing; the message names the Param, the column and the nearest known one.
    """
    for name, param in columns.items():
        if name not in schema.names:
            hint = nearest(name, schema.names) or f"; the DataFrame has {schema.names}"
            raise ValueError(f"{param} {name!r} is not a column of the DataFrame{hint}")


def check_unambiguous(schema: StructType, columns: Sequence[str]) -> None:
    """Refuses a column that Spark cannot tell from another, because their names differ only in case.

    Raises:
        ValueError: There are two such columns; the message names both.
    """
    for name in columns:
        same = [other for other in schema.names if other.lower() == name.lower()]
        if len(same) > 1:
            raise ValueError(f"column {name!r} is ambiguous, the DataFrame has {same}; rename one of them")


def check_types(schema: StructType, columns: Sequence[str]) -> None:
    """Refuses columns of types that a network can neither take nor be trained on.

    Raises:
        ValueError: A column has such a type; the message names the column and the remedy.
    """
    fields = [schema[name] for name in dict.fromkeys(columns)]
    for field in fields:
        # The module is checked by name, because pyspark-client, which has no JVM, has no pyspark.mllib.
        if type(field.dataType).__module__ == "pyspark.mllib.linalg":
            raise ValueError(
                f"column {field.name!r} has a type of the old pyspark.mllib, which only its own algorithms "
                "take; convert it by MLUtils.convertVectorColumnsToML from pyspark.mllib.util"
            )
        for refused, remedy in _REMEDIES.items():
            if isinstance(field.dataType, refused):
                raise ValueError(
                    f"column {field.name!r} has type {field.dataType.simpleString()}, which is no number, "
                    f"date, array or vector; {remedy}"
                )
    columns_from_spark(StructType(fields))


def for_fit(error: ValueError) -> ValueError:
    """A refusal of `write_shards` as a user of `fit` needs it: with how to use the choices that it names."""
    if "to write_shards" not in str(error):
        return error
    return ValueError(f"{error}; fitOnShards trains on shards that write_shards has written")
