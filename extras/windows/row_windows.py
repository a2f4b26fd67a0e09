"""Windows over the rows of a series, in Spark SQL: the last values of each row, and the values that follow.

Spark shuffles and sorts only once, because three steps use the same order (by keys, then time): numbering the
rows of each series, finding where each unbroken run starts, and collecting the values. `collect_list` over a
frame of rows was twice as fast as an array of lags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column, DataFrame, Window, WindowSpec
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, StructField

from ringspark.estimators.columns.expressions import holds_null, input_expression, leaf_type
from ringspark.pipelines.columns import quote
from ringspark.pipelines.spark_errors import MARK

_PREFIX = "__ringspark_"
_NOW, _NUMBER, _BEFORE, _NULL, _START, _LAST_NULL, _TARGETS, _END, _REASON = (
    _PREFIX + name
    for name in ("now", "number", "before", "null", "start", "last_null", "targets", "end", "reason")
)

MICROSECONDS_PER_DAY = 86_400_000_000
WHOLE = ("byte", "short", "integer", "long")
_SINGLE = ("byte", "short", "float", "boolean")


@dataclass(frozen=True, kw_only=True)
class RowWindows:
    """Definition of windows over a DataFrame's rows. A time gap above `max_gap` divides a series into runs.

    Attributes:
        values: Columns whose last `steps` values a window holds.
        target: Column whose values after the window are the targets; None for no targets.
        stride: Number of rows from the end of a window to the end of the next window in the same run.
        max_gap: Largest difference in time between neighbouring rows of a run: in microseconds or days, or in
            the unit of a numeric `time`.
        gap_days: Number of calendar days in `max_gap`. A calendar day may have 25 hours in the session's time
            zone.
        skips_invalid: Whether to drop windows that hold a null, and rows without key or time.
        keeps_unlabeled: Whether to keep windows that lack some of their targets.
    """

    keys: tuple[StructField, ...]
    time: StructField
    values: tuple[StructField, ...]
    target: StructField | None
    steps: int
    stride: int
    horizon: int
    max_gap: int | None
    gap_days: int
    skips_invalid: bool
    keeps_unlabeled: bool

    def over(self, frame: DataFrame, outputs: dict[str, Column], targets: Sequence[str]) -> DataFrame:
        """Returns the rows at which a window ends, with additional columns. Runs no Spark job.

        `outputs` are expressions for one row; each becomes an array of its values in the last `steps` rows.
        `targets` names the column of the label, and then the column of the last target's time.
        """
        histories = {
            name: F.collect_list(value).over(self._order.rowsBetween(1 - self.steps, 0))
            for name, value in outputs.items()
        }
        rows = self._judged(frame, histories)
        label = F.col(_TARGETS) if self.horizon > 1 else F.get(F.col(_TARGETS), F.lit(0))
        added = zip(targets, (label, F.col(_END)), strict=False)
        return rows.where(F.col(_REASON).isNull()).select(
            *(F.col(quote(name)) for name in [*frame.columns, *histories]),
            *(F.when(self._has_targets(), value).alias(name) for name, value in added),
        )

    def counts(self, frame: DataFrame) -> DataFrame:
        """Counts rows by the reason why no window ends at them; null stands for rows that end a window."""
        rows = self._judged(frame, {}).groupBy(F.col(_REASON).alias("reason")).count()
        if not self.skips_invalid:
            return rows
        unplaced = frame.where(self._unplaced()).agg(F.count(F.lit(1)).alias("count"))
        return rows.unionByName(unplaced.select(F.lit("null").alias("reason"), "count"))

    def _judged(self, frame: DataFrame, more: dict[str, Column]) -> DataFrame:
        """Adds the columns `more`, the targets, and `_REASON` with the columns that `_REASON` needs.

        `_REASON` is the reason why no window ends at the row; it is null if a window ends there.
        """
        if self.skips_invalid:
            frame = frame.where(~self._unplaced())
        checked = [self.time, *self.values, *([self.target] if self.target else [])]
        nulls = reduce(or_, (_holds_null(field) for field in checked))
        ticks = input_expression(_col(self.time), self.time.dataType).cast("bigint")
        now = frame.withColumn(_NOW, ticks)  # wide enough for a difference
        numbered = now.withColumns(
            {
                _NUMBER: F.row_number().over(self._order),
                _BEFORE: F.lag(_NOW).over(self._order),
                _NULL: _any_null(self.values) if self.skips_invalid else nulls,
            }
        )
        so_far = self._order.rowsBetween(Window.unboundedPreceding, 0)
        breaks = F.col(_BEFORE).isNull()
        if self.max_gap is not None:
            breaks = breaks | self._is_gap(self.max_gap)
        found = numbered.withColumns(
            {
                _START: F.max(F.when(breaks, F.col(_NUMBER))).over(so_far),
                _LAST_NULL: F.max(F.when(F.col(_NULL), F.col(_NUMBER))).over(so_far),
            }
        )
        return found.withColumns(more | self._targets()).withColumn(_REASON, self._reason())

    def _is_gap(self, max_gap: int) -> Column:
        now, before = F.col(_NOW), F.col(_BEFORE)
        elapsed = now - before > max_gap
        if not self.gap_days:
            return elapsed
        rest = max_gap - self.gap_days * MICROSECONDS_PER_DAY
        days_later = F.timestamp_micros(before) + F.make_interval(days=F.lit(self.gap_days))
        return elapsed & (now - F.unix_micros(days_later) > rest)

    @property
    def _order(self) -> WindowSpec:
        return Window.partitionBy(*(_col(key) for key in self.keys)).orderBy(_NOW)

    def _targets(self) -> dict[str, Column]:
        if self.target is None:
            return {}
        ahead = self._order.rowsBetween(1, self.horizon)
        return {
            # Nulls, and arrays that hold a null, are left out: fewer than `horizon` values are incomplete.
            _TARGETS: F.collect_list(F.when(~_holds_null(self.target), _col(self.target))).over(ahead),
            _END: F.lead(_col(self.time), self.horizon).over(self._order),
            _END + "_start": F.lead(_START, self.horizon).over(self._order),
        }

    def _has_targets(self) -> Column:
        if self.target is None:
            return F.lit(True)
        # If the run continues, it has the same start `horizon` rows later.
        continues = F.coalesce(F.col(_END + "_start") == F.col(_START), F.lit(False))
        return continues & (F.size(_TARGETS) == self.horizon)

    def _reason(self) -> Column:
        """Returns the reason why no window ends at a row, or null.

        The expression raises an error in Spark for rows that cannot belong to a series.
        """
        position = F.col(_NUMBER) - F.col(_START) + 1  # in the run, from 1
        rules = []
        if not self.skips_invalid:
            rules.append((self._unplaced() | F.col(_NULL), F.raise_error(self._has_null())))
        rules += [
            (F.col(_NOW) == F.col(_BEFORE), F.raise_error(self._twice())),
            (position < self.steps, F.lit("short")),
            ((position - self.steps) % self.stride != 0, F.lit("stride")),
            (F.col(_NUMBER) - F.col(_LAST_NULL) < self.steps, F.lit("null")),
        ]
        if not self.keeps_unlabeled:
            rules.append((~self._has_targets(), F.lit("unlabeled")))
        return F.coalesce(*(F.when(applies, why) for applies, why in rules))

    def _unplaced(self) -> Column:
        return _any_null([*self.keys, self.time])

    def _where(self) -> Column:
        parts = [
            F.concat(F.lit(f"{field.name}="), F.coalesce(_col(field).cast("string"), F.lit("null")))
            for field in [*self.keys, self.time]
        ]
        return F.concat_ws(", ", *parts)

    def _twice(self) -> Column:
        names = ", ".join(repr(field.name) for field in [*self.keys, self.time])
        return F.concat(
            F.lit(f"{MARK}two rows have "),
            self._where(),
            F.lit(
                ", so their order is unknown; merge them first, e.g. with "
                f"df.groupBy({names}).agg(...), or add the column that separates their series to keyCols"
            ),
        )

    def _has_null(self) -> Column:
        fields = [*self.keys, self.time, *self.values, *([self.target] if self.target else [])]
        by_name = {field.name: F.when(_holds_null(field), F.lit(repr(field.name))) for field in fields}
        return F.concat(
            F.lit(MARK),
            F.concat_ws(", ", *by_name.values()),
            F.lit(" is null at "),
            self._where(),
            F.lit("; fill or drop it first, or skip such rows with handleInvalid='skip'"),
        )


def numbers_of(fields: Sequence[StructField]) -> Column:
    leaves = {_leaf(field.dataType) for field in fields}
    to = "bigint" if leaves <= set(WHOLE) else "float" if leaves <= set(_SINGLE) else "double"
    # Without arrays, one array: concatenating many arrays of one number would copy each of them.
    if not any(isinstance(field.dataType, VectorUDT | ArrayType) for field in fields):
        return F.array(*(_col(field).cast(to) for field in fields))
    arrays = []
    for field in fields:
        is_array = isinstance(field.dataType, VectorUDT | ArrayType)
        arrays.append(value_of(field).cast(f"array<{to}>") if is_array else F.array(_col(field).cast(to)))
    return F.concat(*arrays)


def value_of(field: StructField) -> Column:
    if isinstance(field.dataType, VectorUDT):
        return vector_to_array(_col(field), "float32")
    return _col(field)


def _leaf(data_type: DataType) -> str:
    if isinstance(data_type, VectorUDT):
        return "float"
    return leaf_type(data_type)[0].typeName()


def _col(field: StructField) -> Column:
    return F.col(quote(field.name))


def _holds_null(field: StructField) -> Column:
    if isinstance(field.dataType, ArrayType):
        return holds_null(_col(field), field.dataType)
    return _col(field).isNull()


def _any_null(fields: Sequence[StructField]) -> Column:
    return reduce(or_, (_holds_null(field) for field in fields))
