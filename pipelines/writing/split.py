"""Chooses the validation rows, by an indicator column or by a hash of the row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ringspark.pipelines.column_stats import ColumnStats
from ringspark.pipelines.columns import quote
from ringspark.pipelines.kinds import Kind
from ringspark.pipelines.kinds.strings import check_seed
from ringspark.pipelines.kinds.vector import canonical_vector, is_vector

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructField

# The hash is reduced to this many steps; a share of them is for validation.
_FRACTION_STEPS = 1 << 30


def split_expression(
    df: DataFrame,
    columns: Mapping[str, Kind] | None,
    validation_col: str | None,
    fraction: float | None,
    seed: int,
) -> SparkColumn | None:
    from pyspark.sql import functions as F

    if validation_col is not None:
        if fraction is not None:
            raise ValueError("set validation_col or validation_fraction, not both")
        if validation_col not in df.columns:
            raise ValueError(
                f"validation_col {validation_col!r} is not a column; known: {', '.join(df.columns)}"
            )
        if columns is not None and validation_col in columns:
            raise ValueError(f"validation_col {validation_col!r} is not stored; remove it from columns")
        check_indicator_type(df.schema[validation_col])
        return F.col(quote(validation_col))
    if fraction is None:
        return None
    if not isinstance(fraction, (int, float)) or not 0 < fraction < 1:
        raise ValueError(f"validation_fraction must be a number between 0 and 1, got {fraction!r}")
    check_seed("seed", seed)
    # Sorted, so that a row keeps its split when a select changes the order of the columns.
    fields = sorted(df.schema.fields, key=lambda field: field.name)
    if any(is_vector(field.dataType) for field in fields):
        values = [
            canonical_vector(F.col(quote(f.name))) if is_vector(f.dataType) else F.col(quote(f.name))
            for f in fields
        ]
        hashed = F.xxhash64(F.lit(seed).cast("bigint"), *values)
    else:
        # SQL text, because 1,000 Column objects take seconds to make.
        names = ", ".join(quote(field.name) for field in fields)
        hashed = F.expr(f"xxhash64(CAST({seed} AS BIGINT), {names})")
    steps = F.pmod(hashed, F.lit(_FRACTION_STEPS).cast("bigint"))
    return steps < F.lit(round(fraction * _FRACTION_STEPS)).cast("bigint")


def check_indicator_type(field: StructField) -> None:
    simple = field.dataType.simpleString()
    if simple not in ("boolean", "tinyint", "smallint", "int", "bigint", "float", "double"):
        raise ValueError(
            f"validation column {field.name!r} must be boolean or 0/1, got type {simple}; cast it to boolean"
        )


def check_indicator(name: str, stats: ColumnStats, nulls: int) -> None:
    if nulls or stats.nans:
        raise ValueError(
            f"validation column {name!r} has {nulls + stats.nans} nulls or NaNs in {stats.rows} rows; "
            "fill them with df.na.fill first"
        )
    if (
        stats.infs
        or stats.fractional
        or (stats.values and not (stats.minimum in (0, 1) and stats.maximum in (0, 1)))
    ):
        raise ValueError(
            f"validation column {name!r} must be boolean or 0/1, "
            f"got values from {stats.minimum} to {stats.maximum}"
        )
