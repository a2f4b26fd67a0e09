"""Checks of a DataFrame's schema, on the driver, before any job starts."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from pyspark.sql.types import StructType

from ringspark.pipelines.columns import columns_from_spark


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


def check_inputs(schema: StructType, columns: Sequence[str], param: str = "featuresCol or inputCols") -> None:
    """Refuses input columns that are missing or hold what a network cannot take.

    Raises:
        ValueError: Names the column and the remedy.
    """
    check_columns_exist(schema, dict.fromkeys(columns, param))
    columns_from_spark(StructType([schema[name] for name in dict.fromkeys(columns)]))
