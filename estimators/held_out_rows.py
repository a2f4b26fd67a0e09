"""Chooses the rows that a fit holds out: by an indicator, by their time, or at random."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    AtomicType,
    DataType,
    DateType,
    NumericType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from ringspark.estimators.columns.schema import find_field
from ringspark.estimators.stages.declared import value_of
from ringspark.estimators.training.settings.data import VALIDATION_INDICATOR_COL
from ringspark.pipelines.columns import is_case_sensitive, quote
from ringspark.pipelines.kinds.vector import canonical_vector

HELD_OUT_COLUMN = "__ringspark_held_out"
"""Start of the name of the indicator that `hold_out` adds."""

_SHARE = 0.15
_BUCKETS = 1_000_000


@dataclass(frozen=True)
class HeldOut:
    """A DataFrame with a column that is true in the rows that are held out.

    Attributes:
        indicator: Name of the column.
        key: What chose the rows, for comparing two splits.
    """

    dataset: DataFrame
    indicator: str
    key: tuple[Any, ...]


def check_one_choice(estimator: Any) -> None:
    """Raises ValueError if an indicator and another Param choose the rows."""
    if not value_of(estimator, VALIDATION_INDICATOR_COL):
        return
    for name, value in (
        ("timeCol", estimator.getTimeCol()),
        ("validationFraction", estimator.getValidationFraction()),
    ):
        if value:
            raise ValueError(
                f"set validationIndicatorCol or {name}, not both; each chooses the rows to hold out"
            )


def hold_out(estimator: Any, dataset: DataFrame, names: Sequence[str]) -> HeldOut:
    """Splits by validationIndicatorCol, else by timeCol, else at random by the seed.

    Holds out 15 % of the rows if validationFraction is unset. A random split keeps rows that are equal in
    the columns `names` together.
    """
    check_one_choice(estimator)
    given, fraction = value_of(estimator, VALIDATION_INDICATOR_COL), estimator.getValidationFraction()
    time = estimator.getTimeCol()
    if given:
        return HeldOut(dataset, given, ())
    share = _SHARE if fraction is None else fraction
    if time:
        return hold_out_newest(dataset, time, share)
    key, schema = (estimator.getSeed(), share), dataset.schema
    values = [value for name in names for value in _hashable(F.col(quote(name)), schema[name].dataType)]
    bucket = F.pmod(F.xxhash64(F.lit(estimator.getSeed()), *values), F.lit(_BUCKETS))
    held = dataset.withColumn(_indicator(key), bucket < F.lit(int(share * _BUCKETS)))
    return HeldOut(held, _indicator(key), key)


def _indicator(key: tuple[Any, ...]) -> str:
    """Returns the indicator's name, unique per split, because fits with equal columns share shards."""
    return f"{HELD_OUT_COLUMN}_{zlib.crc32(repr(key).encode()):08x}"


def _hashable(value: Column, data_type: DataType) -> list[Column]:
    """Returns the parts of a column that Spark can hash; none for a map, or an array of maps or structs."""
    if data_type.simpleString() == "vector":
        # A sparse vector and a dense one with the same numbers are equal.
        return [canonical_vector(value)]
    if isinstance(data_type, StructType):
        parts = [_hashable(value.getField(field.name), field.dataType) for field in data_type.fields]
        return [part for each in parts for part in each]
    inner = data_type
    while isinstance(inner, ArrayType):
        inner = inner.elementType
    return [value] if isinstance(inner, AtomicType) else []


def hold_out_newest(dataset: DataFrame, name: str, share: float) -> HeldOut:
    """Adds an indicator, true in about the newest `share` of the rows by column `name`.

    Rows of the same time are on the same side. Runs one Spark job.

    Raises:
        ValueError: The column holds no times or numbers, or holds the same value in all rows.
    """
    field = find_field(name, "timeCol", dataset.schema, is_case_sensitive(dataset.sparkSession))
    if not isinstance(field.dataType, (DateType, TimestampType, TimestampNTZType, NumericType)):
        raise ValueError(
            f"timeCol {name!r} must hold dates, timestamps or numbers, "
            f"it holds {field.dataType.simpleString()}"
        )
    time = F.col(quote(field.name))
    number = time.cast("timestamp").cast("double")
    if isinstance(field.dataType, NumericType):
        number = time.cast("double")
    found = dataset.agg(F.percentile_approx(number, 1 - share, 10_000), F.min(number), F.max(number)).head()
    assert found is not None
    cut, first, last = found
    if first == last:
        raise ValueError(f"timeCol {name!r} is {first} in every row; give validationFraction instead")
    # If the newest rows all have the time of the cut, they are held out, and all older rows train.
    newest = number > F.lit(cut) if cut < last else number >= F.lit(cut)
    key = (name, share)
    return HeldOut(
        dataset.withColumn(_indicator(key), F.coalesce(newest, F.lit(False))), _indicator(key), key
    )
