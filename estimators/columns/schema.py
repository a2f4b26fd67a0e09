"""Checks of a DataFrame's schema, on the driver, before any job starts."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql.types import BinaryType, DataType, StringType, StructField, StructType

from ringspark.estimators.names import nearest
from ringspark.pipelines.columns import columns_from_spark

# `fit` and `transform` take columns as they are; they do not have the choices of `write_shards`.
_REMEDIES: dict[type[DataType], str] = {
    StringType: "index it with StringIndexer first, or hash it with F.pmod(F.xxhash64(column), F.lit(1024))",
    BinaryType: "decode it into an array of numbers first",
}


def fields_named(name: str, schema: StructType, exact: bool) -> list[StructField]:
    """Returns the fields that Spark means by a name.

    Args:
        exact: Whether the session has `spark.sql.caseSensitive`; else names in another case are meant too.
    """
    if exact:
        return [field for field in schema.fields if field.name == name]
    return [field for field in schema.fields if field.name.lower() == name.lower()]


def field_named(name: str, param: str, schema: StructType, exact: bool) -> StructField:
    """Returns the one field that Spark means by a name.

    Args:
        param: Name of the Param that holds the name.
        exact: See `fields_named`.

    Raises:
        ValueError: There is none, and the message names the nearest one; or there are several.
    """
    found = fields_named(name, schema, exact)
    if not found:
        hint = nearest(name, schema.names) or f"; the DataFrame has {schema.names}"
        raise ValueError(f"{param} {name!r} is not a column of the DataFrame{hint}")
    if len(found) > 1:
        raise ValueError(
            f"column {name!r} is ambiguous, the DataFrame has {[f.name for f in found]}; rename one of them"
        )
    return found[0]


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
