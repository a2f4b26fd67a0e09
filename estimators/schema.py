"""Checks of a DataFrame's schema, on the driver, before any job starts."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from pyspark.sql.types import BinaryType, DataType, StringType, StructType

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
            near = get_close_matches(name, schema.names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the DataFrame has {schema.names}"
            raise ValueError(f"{param} {name!r} is not a column of the DataFrame; {hint}")


def check_types(schema: StructType, columns: Sequence[str]) -> None:
    """Refuses columns that hold what a network can neither take nor be trained on.

    Raises:
        ValueError: Names the column and the remedy.
    """
    fields = [schema[name] for name in dict.fromkeys(columns)]
    for field in fields:
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
    if "write_shards" not in str(error):
        return error
    return ValueError(f"{error}; fitOnShards trains on shards that write_shards has written")
