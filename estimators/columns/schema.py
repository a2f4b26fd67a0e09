"""Checks of a DataFrame's schema, on the driver, before any job starts."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql.types import BinaryType, DataType, StringType, StructType

from ringspark.estimators.names import nearest
from ringspark.pipelines.columns import columns_from_spark

# `fit` and `transform` take a column as it is; the choices that `write_shards` has are not theirs.
_REMEDIES: dict[type[DataType], str] = {
    StringType: "index it with StringIndexer first, or hash it with F.pmod(F.xxhash64(column), F.lit(1024))",
    BinaryType: "decode it into an array of numbers first",
}


def check_columns_exist(schema: StructType, columns: dict[str, str]) -> None:
    """Refuses a Param that names a column which the DataFrame lacks.

    Args:
        columns: Column name -> Param that names it.

    Raises:
        ValueError: Names the Param, the column and the nearest one that exists.
    """
    for name, param in columns.items():
        if name not in schema.names:
            hint = nearest(name, schema.names) or f"; the DataFrame has {schema.names}"
            raise ValueError(f"{param} {name!r} is not a column of the DataFrame{hint}")


def check_unambiguous(schema: StructType, columns: Sequence[str]) -> None:
    """Refuses a column that Spark cannot tell from another one, as their names differ in case only.

    Raises:
        ValueError: Names both.
    """
    for name in columns:
        same = [other for other in schema.names if other.lower() == name.lower()]
        if len(same) > 1:
            raise ValueError(f"column {name!r} is ambiguous, the DataFrame has {same}; rename one of them")


def check_types(schema: StructType, columns: Sequence[str]) -> None:
    """Refuses columns that hold what a network can neither take nor be trained on.

    Raises:
        ValueError: Names the column and the remedy.
    """
    fields = [schema[name] for name in dict.fromkeys(columns)]
    for field in fields:
        # By the name of its module: one without JVM, pyspark-client, has no pyspark.mllib.
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


def check_inputs(schema: StructType, columns: Sequence[str], param: str = "featuresCol or inputCols") -> None:
    """Refuses input columns that are missing or hold what a network cannot take.

    Raises:
        ValueError: Names the column and the remedy.
    """
    check_columns_exist(schema, dict.fromkeys(columns, param))
    check_types(schema, columns)


def for_fit(error: ValueError) -> ValueError:
    """The refusal of `write_shards` as a user of `fit` needs it: says how to use the choices it names."""
    text = str(error).replace(
        "or pass handle_invalid='skip' or 'keep' to write_shards", "or set handleInvalid='skip'"
    )
    text = text.replace(" or Ragged() to write_shards", " to write_shards")
    text = text.replace("validation_col", "validationIndicatorCol")
    if "write_shards" in text:
        text += "; fitOnShards trains on shards that write_shards has written"
    return ValueError(text)
