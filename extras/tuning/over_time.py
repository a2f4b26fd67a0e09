"""Folds of a time series: each fold validates on rows that are later than its training rows, after a gap.

Time is divided into k + 1 blocks with about equally many rows. Fold i trains on blocks 0 to i and validates
on block i + 1, counted from 0.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, DateType, NumericType

from ringspark.estimators.columns.schema import find_field
from ringspark.estimators.held_out_rows import exact_number, find_time
from ringspark.extras.tuning.folds import FOLD, check_count
from ringspark.pipelines.columns import check_frame, is_case_sensitive, quote
from ringspark.pipelines.fixed_rows import fix_rows


class Fold(NamedTuple):
    """The rows of one fold."""

    train: DataFrame
    """The training rows."""
    validation: DataFrame
    """The validation rows."""


def fold_pairs(df: DataFrame, k: int, foldCol: str = FOLD) -> list[Fold]:
    """Returns the folds that a column defines, from `stratified_folds`, `grouped_folds` or your own code.

    The column stays in the rows. Fold i validates on the rows with number i and trains on all other rows. If
    the rows could change between two jobs, the folds hold a copy of them (`fix_rows`).

    Raises:
        ValueError: The column is missing, a row has null or a number outside 0 to k-1, or one of these
            numbers does not occur.
    """
    check_frame(df, "fold_pairs")
    check_count("fold_pairs", k)
    name = find_field(foldCol, "foldCol", df.schema, is_case_sensitive(df.sparkSession)).name
    column, df = F.col(quote(name)), fix_rows(df)
    found = {row[0] for row in df.select(column).distinct().limit(k + 1).collect()}
    if found != set(range(k)):
        given = ", ".join(sorted(map(str, found)))
        raise ValueError(
            f"foldCol {name!r} must hold each number from 0 to {k - 1} and nothing else, got "
            f"{given or 'no rows'}; set k to the number of folds, or correct the column"
        )
    return [Fold(df.where(column != i), df.where(column == i)) for i in range(k)]


def time_folds(df: DataFrame, timeCol: str, k: int, gap: float | timedelta = 0) -> list[Fold]:
    """Splits a time series into k folds; in each fold the training rows come before the validation rows.

    Runs a few jobs. Rows with equal times stay together. The blocks end at exact quantiles of the times, so
    they depend neither on the order of the rows nor on partitions. For this, Spark collects one count per
    distinct time. If the rows could change between two jobs, the folds hold a copy of them (`fix_rows`).

    Args:
        timeCol: A column of numbers, dates or timestamps.
        gap: Smallest time between the last training row and the first validation row, in the column's unit; a
            `timedelta` for dates and timestamps.

    Returns:
        The folds, earliest first.

    Raises:
        ValueError: An argument or the rows are invalid.
    """
    check_frame(df, "time_folds")
    check_count("time_folds", k)
    field = find_time(df, timeCol)
    width, df = _width(gap, field.name, field.dataType), fix_rows(df)
    time = exact_number(df, F.col(quote(field.name)), field.dataType)
    shares = ", ".join(repr(i / (k + 1)) for i in range(1, k + 1))
    measured = df.select(time.alias("time")).agg(
        F.expr(f"percentile(time, array({shares}))"), F.count_if(F.isnull("time") | F.isnan("time"))
    )
    cuts, nulls = measured.collect()[0]
    if nulls:
        raise ValueError(
            f"timeCol {field.name!r} must have a value in every row, got {nulls} rows without one; drop or "
            "fill them"
        )
    if cuts is None:
        raise ValueError("time_folds needs rows, got none")
    conditions = [
        (time < F.lit(start - width), (time >= F.lit(start)) & (F.lit(end is None) | (time < F.lit(end))))
        for start, end in zip(cuts, [*cuts[1:], None], strict=True)
    ]
    counts = df.agg(*(F.count_if(condition) for pair in conditions for condition in pair)).collect()[0]
    for number, rows in enumerate(zip(counts[::2], counts[1::2], strict=True)):
        if not all(rows):
            what = "training" if not rows[0] else "validation"
            raise ValueError(
                f"time_folds leaves fold {number} without {what} rows, with k={k} and gap={gap!r} over "
                f"column {field.name!r}; lower k or gap"
            )
    return [Fold(df.where(train), df.where(validation)) for train, validation in conditions]


def _width(gap: Any, name: str, data_type: DataType) -> float:
    """Returns the gap in microseconds for timestamps, in days for dates, unchanged for numbers."""
    is_number = isinstance(data_type, NumericType)
    kind = (int, float) if is_number else timedelta
    # Zero has no unit.
    if isinstance(gap, bool) or not (isinstance(gap, kind) or gap == 0):
        words = "a number" if is_number else "a datetime.timedelta"
        raise ValueError(
            f"gap must be {words}, because timeCol {name!r} is {data_type.simpleString()}, got {gap!r}"
        )
    width = gap / timedelta(microseconds=1) if isinstance(gap, timedelta) else float(gap)
    if isinstance(data_type, DateType):
        width /= timedelta(days=1) / timedelta(microseconds=1)
    if not 0 <= width < float("inf"):
        raise ValueError(f"gap must be finite and not negative, got {gap!r}")
    return width
