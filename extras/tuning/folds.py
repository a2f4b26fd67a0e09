"""Folds as a column of numbers 0..k-1, for Spark's `CrossValidator(foldCol=...)` and `fold_pairs`.

A row's fold depends only on the rows and the seed. Rows are assigned to folds in the order of a hash. The
sizes of two folds differ by at most one row per class in `stratified_folds`, and by at most the largest group
in `grouped_folds`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql.types import DataType

from ringspark.estimators.columns.schema import FieldIndex, find_field
from ringspark.pipelines.columns import check_frame, is_case_sensitive, quote
from ringspark.pipelines.fixed_rows import fix_rows

FOLD = "fold"

# Names within a plan; none reaches the result.
_KEY, _ROWS, _START, _KEYED, _FIRST, _SECOND = (
    f"__ringspark_{name}" for name in ("key", "rows", "start", "keyed", "a", "b")
)


def stratified_folds(
    df: DataFrame,
    labelCol: str,
    k: int,
    seed: int = 0,
    *,
    keyCols: Sequence[str] | None = None,
    foldCol: str = FOLD,
) -> DataFrame:
    """Adds a column of folds; the numbers of rows of a class in two folds differ by at most one.

    Runs one job, which counts the classes. If the rows could change between two jobs, the result holds a copy
    of them (`fix_rows`).

    Args:
        k: Number of folds, at least 2.
        keyCols: Columns whose hash orders the rows, such as an id. If the key is unique, a row keeps its fold
            when other columns are added. None takes all columns.
        foldCol: Name of the new column, of integers from 0.

    Raises:
        ValueError: An argument or the rows are invalid.
    """
    label = _check(df, "stratified_folds", "labelCol", labelCol, k, foldCol)
    exact = is_case_sensitive(df.sparkSession)
    if keyCols is not None and (isinstance(keyCols, str) or not keyCols):
        raise ValueError(f"keyCols must be a list of at least one column, got {keyCols!r}; None takes all")
    keys = [find_field(name, "keyCols", df.schema, exact).name for name in keyCols or ()]
    df = fix_rows(df)
    classes = _count_rows(df, "labelCol", label)
    # As text, because the Python client lacks some types, such as months.
    smallest = classes.orderBy(_ROWS, _KEY).withColumn(_KEY, F.col(_KEY).cast("string")).first()
    if smallest is None or smallest[_ROWS] < k:
        found = "no rows" if smallest is None else f"{smallest[_ROWS]} of class {smallest[_KEY]!r}"
        raise ValueError(
            f"stratified_folds needs at least one row of each class per fold ({k}), got {found}; lower k, or "
            "drop or merge rare classes"
        )
    # The start of each class; one row per class, so one partition holds them.
    before = Window.orderBy(_KEY).rowsBetween(Window.unboundedPreceding, -1)
    starts = classes.select(_KEY, F.coalesce(F.sum(_ROWS).over(before), F.lit(0)).alias(_START))
    # Rows of one key are ordered by all columns, so their input order has no effect.
    every = _hashed_parts(df, df.columns)
    hashed = df.select(
        "*",
        F.xxhash64(F.lit(seed), *(_hashed_parts(df, keys) if keys else every)).alias(_KEYED),
        F.xxhash64(F.lit(seed), *every).alias(_FIRST),
        F.xxhash64(F.lit(~seed), *every).alias(_SECOND),
    )
    place = F.row_number().over(Window.partitionBy(quote(label)).orderBy(_KEYED, _FIRST, _SECOND))
    dealt = hashed.join(F.broadcast(starts), F.col(quote(label)) == F.col(_KEY), "left")
    fold = F.pmod(_found(_START) + place - 1, F.lit(k)).cast("int")
    return dealt.withColumn(foldCol, fold).drop(_KEY, _START, _KEYED, _FIRST, _SECOND)


def grouped_folds(df: DataFrame, groupCol: str, k: int, seed: int = 0, *, foldCol: str = FOLD) -> DataFrame:
    """Adds a column of folds that never splits a group.

    Runs one job, which counts the groups. If the rows could change between two jobs, the result holds a copy
    of them (`fix_rows`).

    Args:
        k: Number of folds, at least 2.
        foldCol: Name of the new column, of integers from 0.

    Raises:
        ValueError: An argument or the rows are invalid.
    """
    group, df = _check(df, "grouped_folds", "groupCol", groupCol, k, foldCol), fix_rows(df)
    groups = _count_rows(df, "groupCol", group)
    # Counts at most k groups.
    found = groups.limit(k).count()
    if found < k:
        raise ValueError(
            f"grouped_folds needs at least one group per fold ({k}), got {found} in column {group!r}; lower k"
        )
    hashed = F.xxhash64(F.lit(seed), F.col(_KEY))
    place = F.row_number().over(Window.orderBy(F.desc(_ROWS), hashed, F.col(_KEY)))
    dealt = groups.select(_KEY, F.pmod(place - 1, F.lit(k)).cast("int").alias(_START))
    joined = df.join(dealt, F.col(quote(group)) == F.col(_KEY), "left")
    return joined.withColumn(foldCol, _found(_START)).drop(_KEY, _START)


def check_count(name: str, k: Any) -> None:
    if isinstance(k, bool) or not isinstance(k, int) or k < 2:
        raise ValueError(f"k of {name} must be a whole number of at least 2 folds, got {k!r}")


def _check(df: DataFrame, name: str, param: str, column: str, k: int, fold_col: str) -> str:
    check_frame(df, name)
    check_count(name, k)
    exact = is_case_sensitive(df.sparkSession)
    if FieldIndex(df.schema, exact).all(fold_col):
        raise ValueError(f"foldCol {fold_col!r} is already a column of the DataFrame; choose another name")
    field = find_field(column, param, df.schema, exact)
    if not _has_hash(field.dataType) or not _has_order(df, field.name):
        raise ValueError(
            f"{param} {field.name!r} must have values that can be compared, got "
            f"{field.dataType.simpleString()}; use another column"
        )
    return field.name


def _found(name: str) -> Column:
    """Returns the joined column `name`; Spark raises an error for a row that the join did not find."""
    lost = (
        "a row was not among the rows that were counted for the folds, because the DataFrame gives other "
        "rows each time it runs; pass df.localCheckpoint()"
    )
    return F.coalesce(F.col(name), F.raise_error(F.lit(lost)).cast("int"))


def _hashed_parts(df: DataFrame, names: Sequence[str]) -> list[Column]:
    types = {field.name: field.dataType for field in df.schema.fields}
    found = []
    for name in names:
        column = F.col(quote(name))
        # A hash takes no maps, and skips nulls: (null, 1) and (1, null) would be equal.
        hashable = column if _has_hash(types[name]) else F.to_json(F.struct(column))
        found += [hashable, F.isnull(column)]
    return found


def _has_hash(data_type: DataType) -> bool:
    text = data_type.simpleString()
    return "map<" not in text and "variant" not in text


def _has_order(df: DataFrame, name: str) -> bool:
    """Returns whether Spark can order the values of a column; runs no job."""
    try:
        _ = df.orderBy(quote(name)).schema
    except AnalysisException:
        return False
    return True


def _count_rows(df: DataFrame, param: str, name: str) -> DataFrame:
    """Returns the number of rows per value of a column; raises ValueError if a value is null."""
    counts = df.groupBy(F.col(quote(name)).alias(_KEY)).agg(F.count(F.lit(1)).alias(_ROWS))
    found = counts.where(F.isnull(_KEY)).first()
    if found is not None:
        raise ValueError(
            f"{param} {name!r} must have a value in every row, got {found[_ROWS]} rows with null; drop or "
            "fill them"
        )
    return counts
