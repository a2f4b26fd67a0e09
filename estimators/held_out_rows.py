"""Chooses the rows that a fit holds out: by an indicator, by their time, or at random."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    LongType,
    NumericType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from ringspark.estimators.columns.schema import find_field
from ringspark.estimators.stages.declared import value_of
from ringspark.pipelines.columns import is_case_sensitive, quote
from ringspark.pipelines.fixed_rows import fix_rows
from ringspark.pipelines.kinds.scalar import number_of
from ringspark.pipelines.kinds.vector import canonical_vector

HELD_OUT_COLUMN = "__ringspark_held_out"
"""Start of the name of the indicator that `hold_out` adds."""

# Types that Spark hashes. A later Spark may have others.
_HASHED = (NumericType, StringType, BinaryType, BooleanType, DateType, TimestampType, TimestampNTZType)
_SHARE = 0.15
_BUCKETS = 1 << 30


@dataclass(frozen=True)
class HeldOut:
    """A DataFrame with a column, `indicator`, that is true in the rows that are held out."""

    dataset: DataFrame
    indicator: str


def check_one_choice(estimator: Any) -> None:
    """Raises ValueError if an indicator and another Param choose the rows."""
    if not value_of(estimator, "validationIndicatorCol"):
        return
    for name, value in (
        ("timeCol", estimator.getTimeCol()),
        ("validationFraction", estimator.getValidationFraction()),
    ):
        if value:
            raise ValueError(
                f"set validationIndicatorCol or {name}, not both; each chooses the rows to hold out"
            )


def hold_out(estimator: Any, dataset: DataFrame, names: Sequence[str], is_sketch: bool = False) -> HeldOut:
    """Splits by validationIndicatorCol, else by timeCol, else at random by the seed.

    Holds out 15 % of the rows if validationFraction is unset. A random split keeps rows that are equal in
    the columns `names` together. A sketch runs no job, and holds out no row that has no indicator.
    """
    check_one_choice(estimator)
    given, fraction = value_of(estimator, "validationIndicatorCol"), estimator.getValidationFraction()
    time = estimator.getTimeCol()
    if given:
        return HeldOut(dataset, given)
    share = _SHARE if fraction is None else fraction
    if is_sketch:
        if time:
            find_time(dataset, time)
        return HeldOut(dataset.withColumn(HELD_OUT_COLUMN, F.lit(False)), HELD_OUT_COLUMN)
    if time:
        return hold_out_newest(dataset, time, share)
    return hold_out_at_random(dataset, names, share, estimator.getSeed())


def hold_out_at_random(dataset: DataFrame, names: Sequence[str], share: float, seed: int) -> HeldOut:
    """Adds an indicator, true in about `share` of the rows, chosen by a hash of the columns `names`.

    Rows that are equal in these columns are on one side. If a side is empty, or the share is off by over
    half, equal rows that are over 1 % of all rows are divided. Runs a job, or more to divide.

    Args:
        dataset: Rows that are the same in every job, see `fix_rows`.
    """
    schema, indicator = dataset.schema, _indicator((seed, share))
    values = [value for name in names for value in _hashable(F.col(quote(name)), schema[name].dataType)]
    digest = F.xxhash64(F.lit(seed), *values)
    held = F.pmod(digest, F.lit(_BUCKETS)) < F.lit(int(share * _BUCKETS))
    found = dataset.agg(F.count(F.lit(1)), F.count(F.when(held, F.lit(1)))).head()
    assert found is not None
    rows, chosen = found
    noise = 5 * math.sqrt(rows * share * (1 - share))
    if rows > 1 and (chosen in (0, rows) or abs(chosen - share * rows) > max(0.5 * share * rows, noise)):
        # Equal rows are numbered, in no particular order, so the numbers are fixed before they are used.
        equal = Window.partitionBy(digest)
        number = F.row_number().over(equal.orderBy(digest))
        is_frequent = F.count(F.lit(1)).over(equal) > F.lit(rows / 100)
        bucket = F.pmod(F.xxhash64(digest, F.when(is_frequent, number)), F.lit(_BUCKETS))
        dataset = fix_rows(dataset.withColumn(indicator, bucket))
        most = min(share, (rows - 1) / rows)
        cut = dataset.agg(F.percentile_approx(indicator, most, 10_000)).head()
        assert cut is not None
        held = F.col(indicator) <= F.lit(cut[0])
    return HeldOut(dataset.withColumn(indicator, held), indicator)


def _indicator(key: tuple[Any, ...]) -> str:
    """Returns the indicator's name, unique per split, because fits with equal columns share shards."""
    return f"{HELD_OUT_COLUMN}_{zlib.crc32(repr(key).encode()):08x}"


def _hashable(value: Column, data_type: DataType) -> list[Column]:
    """Returns the parts of a column that Spark can hash; none of other types, such as maps."""
    if data_type.simpleString() == "vector":
        # A sparse vector and a dense one with the same numbers are equal.
        return [canonical_vector(value)]
    if isinstance(data_type, StructType):
        parts = [_hashable(value.getField(field.name), field.dataType) for field in data_type.fields]
        return [part for each in parts for part in each]
    inner = data_type
    while isinstance(inner, ArrayType):
        inner = inner.elementType
    return [value] if isinstance(inner, _HASHED) else []


def hold_out_newest(dataset: DataFrame, name: str, share: float) -> HeldOut:
    """Adds an indicator, true in about the newest `share` of the rows by column `name`.

    Rows of the same time are on the same side. Runs up to two Spark jobs.

    Raises:
        ValueError: The column holds no times or numbers, no value, or one value in all rows.
    """
    field = find_time(dataset, name)
    time = F.col(quote(field.name))
    number = exact_number(dataset, time, field.dataType, 1 - share)
    found = dataset.agg(
        F.percentile_approx(number, 1 - share, 10_000),
        F.min(number),
        F.max(number),
        F.min(time).cast("string"),
    ).head()
    assert found is not None
    cut, first, last, given = found
    if cut is None:
        raise ValueError(f"timeCol {name!r} has no value in any row; give validationFraction instead")
    if first == last:
        raise ValueError(f"timeCol {name!r} is {given} in every row; give validationFraction instead")
    # If the newest rows all have the time of the cut, they are held out, and all older rows train.
    newest = number > F.lit(cut) if cut < last else number >= F.lit(cut)
    indicator = _indicator((name, share))
    return HeldOut(dataset.withColumn(indicator, F.coalesce(newest, F.lit(False))), indicator)


def find_time(dataset: DataFrame, name: str) -> StructField:
    """Returns the column `timeCol`; raises ValueError if it holds no times or numbers."""
    field = find_field(name, "timeCol", dataset.schema, is_case_sensitive(dataset.sparkSession))
    if not isinstance(field.dataType, (DateType, TimestampType, TimestampNTZType, NumericType)):
        raise ValueError(
            f"timeCol {name!r} must hold dates, timestamps or numbers, "
            f"it holds {field.dataType.simpleString()}; cast it"
        )
    return field


def exact_number(dataset: DataFrame, value: Column, data_type: DataType, share: float = 0.5) -> Column:
    """Returns numbers, dates or timestamps as doubles; NaN becomes null.

    Dates become days and timestamps microseconds. A double is exact for whole numbers up to 2^53. If a value
    is larger, the quantile `share` is subtracted first, so near values stay distinct. Runs a job for bigint,
    decimals and timestamps.
    """
    digits = 0
    if isinstance(data_type, DateType):
        return F.unix_date(value).cast("double")
    if isinstance(data_type, (TimestampType, TimestampNTZType)):
        value = number_of(value, data_type.typeName())
    elif isinstance(data_type, DecimalType):
        digits = data_type.scale
    elif not isinstance(data_type, LongType):
        return F.when(~F.isnan(value.cast("double")), value.cast("double"))
    rounded = value.cast("double")
    found = dataset.agg(F.percentile_approx(value, share, 10_000), F.max(F.abs(rounded))).head()
    assert found is not None
    middle, largest = found
    if middle is None or largest * 10**digits <= 2**53:
        return rounded
    exact = value.cast("decimal(38,0)") if isinstance(middle, int) else value
    distance = F.try_subtract(exact, F.lit(Decimal(middle))).cast("double")
    return F.coalesce(distance, rounded - F.lit(float(middle)))
