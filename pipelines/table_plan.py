"""Decides what a network gets of each column of a table, from the types and a few passes over the rows.

One pass measures the numbers and dates, a second one counts the strings and the numbers that repeat. Spark
aggregates; the driver receives quantiles and the frequent values, whatever the number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ringspark.pipelines.columns import quote
from ringspark.pipelines.kinds.scalar import number_of
from ringspark.pipelines.kinds.table_row import CALENDAR, TableColumn, TableRow

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

BINS = 32
MAX_WORDS = 20_000
MAX_ITEMS = 1_024

_MAX_LEVELS = 5_000
# A string that almost every row has its own of says nothing about other rows.
_ID_SHARE, _ID_ROWS = 0.9, 100
_LONG_TEXT = 60
_COLUMNS_PER_JOB = 64
_SHARES = tuple(np.linspace(0.0, 1.0, BINS + 1).tolist())
_DAY = 86_400.0
_NUMERIC = ("boolean", "tinyint", "smallint", "int", "bigint", "float", "double")
_MIN_SPAN = {"hour": 0.0, "weekday": 8 * _DAY, "monthday": 45 * _DAY, "yearday": 300 * _DAY}


@dataclass(frozen=True, kw_only=True)
class ColumnUse:
    """What became of one column.

    Attributes:
        column: Name of the column, with the fields inside it.
        type: Spark type.
        distinct: Approximate number of different values; None if not counted.
        missing: Share of the rows without a value.
        use: What the network gets; "left out" for nothing.
        reason: Why.
    """

    column: str
    type: str
    distinct: int | None
    missing: float
    use: str
    reason: str

    def to_json(self) -> dict[str, Any]:
        return {
            name: getattr(self, name) for name in ("column", "type", "distinct", "missing", "use", "reason")
        }


@dataclass(frozen=True)
class TablePlan:
    """The column type of a table's rows.

    Attributes:
        kind: Numbers and ids of each row.
        edges: For each number, the ascending edges of its bins, in the standardized unit.
        uses: What became of every column.
    """

    kind: TableRow
    edges: list[list[float]]
    uses: list[ColumnUse]


@dataclass(frozen=True)
class _Leaf:
    """One value per row: a column, a field of a struct, or an item of an array."""

    name: str
    type: str
    value: Any
    path: tuple[str, ...] = ()
    item: int | None = None
    family: str = "number"

    @property
    def title(self) -> str:
        item = "" if self.item is None else f"[{self.item}]"
        return ".".join((self.name, *self.path)) + item


@dataclass
class _Measure:
    """Statistics of one leaf."""

    count: int = 0
    distinct: int = 0
    low: float = math.nan
    high: float = math.nan
    quantiles: list[float] = field(default_factory=list)
    length: float = 0.0
    has_hours: bool = False
    values: list[tuple[Any, int]] = field(default_factory=list)


def plan_table(frame: DataFrame, names: Sequence[str]) -> TablePlan:
    """Returns the plan for the columns `names` of a DataFrame. Runs a few Spark jobs.

    Raises:
        ValueError: The table has no rows, or no column of use.
    """
    uses: list[ColumnUse] = []
    schema = frame.schema
    leaves = list(_leaves(frame, [schema[name] for name in names], uses))
    rows, measures = _measure(frame, leaves)
    if not rows:
        raise ValueError("the table has no rows to train on; check the filters of the DataFrame")
    _count_values(frame, leaves, measures, rows)
    columns: list[TableColumn] = []
    edges: list[list[float]] = []
    for leaf, measure in zip(leaves, measures, strict=True):
        found, bins, use, reason = _decide(leaf, measure, rows)
        columns += found
        edges += bins
        uses.append(
            ColumnUse(
                column=leaf.title,
                type=leaf.type,
                distinct=measure.distinct,
                missing=round(1 - measure.count / rows, 6),
                use=use,
                reason=reason,
            )
        )
    if not columns:
        left_out = "; ".join(f"{use.column}: {use.reason}" for use in uses[:3])
        raise ValueError(f"no column of the table is of use to a network ({left_out}); give other columns")
    return TablePlan(TableRow(tuple(columns)), edges, uses)


def _leaves(frame: DataFrame, fields: Iterable[Any], uses: list[ColumnUse]) -> Iterator[_Leaf]:
    from pyspark.sql import functions as F

    for top in fields:
        column = F.col(quote(top.name))
        yield from _leaves_of(frame, top.name, (), top.dataType, column, uses)


def _leaves_of(
    frame: DataFrame,
    name: str,
    path: tuple[str, ...],
    data_type: DataType,
    value: SparkColumn,
    uses: list[ColumnUse],
) -> Iterator[_Leaf]:
    from pyspark.sql import functions as F

    simple, family = data_type.simpleString(), data_type.typeName().split("(")[0].split(" ")[0]
    if (simple in _NUMERIC and simple != "boolean") or simple.startswith("decimal"):
        yield _Leaf(name, simple, number_of(value, family).cast("double"), path)
    elif simple == "boolean" or family in ("string", "varchar", "char"):
        yield _Leaf(name, simple, value.cast("string"), path, family="words")
    elif family in ("date", "timestamp", "timestamp_ntz"):
        yield _Leaf(name, simple, value, path, family="calendar")
    elif family == "struct":
        for inner in data_type.fields:  # type: ignore[attr-defined]
            part = value.getField(inner.name)
            yield from _leaves_of(frame, name, (*path, inner.name), inner.dataType, part, uses)
    elif simple == "vector" or (family == "array" and data_type.elementType.simpleString() in _NUMERIC):  # type: ignore[attr-defined]
        array = value
        if simple == "vector":
            from pyspark.ml.functions import vector_to_array

            array = vector_to_array(value)
        low, high = frame.agg(F.min(F.size(array)), F.max(F.size(array))).head() or (None, None)
        size = int(high) if high is not None else 0
        if size < 1 or size > MAX_ITEMS or (low != high and min(low, 0) >= 0 and low != high):
            reason = f"rows hold {low} to {high} numbers, and only equal lengths up to {MAX_ITEMS} are taken"
            uses.append(_left_out(name, path, simple, reason))
            return
        for item in range(size):
            yield _Leaf(name, simple, F.get(array, F.lit(item)).cast("double"), path, item)
    else:
        uses.append(_left_out(name, path, simple, "a network cannot take this type"))


def _left_out(name: str, path: tuple[str, ...], simple: str, reason: str) -> ColumnUse:
    title = ".".join((name, *path))
    return ColumnUse(column=title, type=simple, distinct=None, missing=0.0, use="left out", reason=reason)


def _measure(frame: DataFrame, leaves: Sequence[_Leaf]) -> tuple[int, list[_Measure]]:
    """Returns the number of rows, and the statistics of each leaf."""
    from pyspark.sql import functions as F

    measures: list[_Measure] = []
    rows = 0
    for start in range(0, max(1, len(leaves)), _COLUMNS_PER_JOB):
        some = leaves[start : start + _COLUMNS_PER_JOB]
        found = frame.agg(
            F.count(F.lit(1)).alias("rows"),
            *(_statistics(leaf).alias(str(index)) for index, leaf in enumerate(some)),
        ).head()
        assert found is not None
        rows = found["rows"]
        for index in range(len(some)):
            row = found[str(index)].asDict()
            measures.append(_Measure(**{key: value for key, value in row.items() if value is not None}))
    return rows, measures


def _statistics(leaf: _Leaf) -> SparkColumn:
    from pyspark.sql import functions as F

    if leaf.family == "words":
        return F.struct(
            F.count(leaf.value).alias("count"),
            F.approx_count_distinct(leaf.value).alias("distinct"),
            F.avg(F.length(leaf.value)).alias("length"),
        )
    value, has_hours = leaf.value, F.lit(False)
    if leaf.family == "calendar":
        value = local_seconds(leaf.value, leaf.type)
        has_hours = F.max(value % F.lit(_DAY)) > 0
    value = F.when(~F.isnan(value) & (F.abs(value) < F.lit(math.inf)), value)
    return F.struct(
        F.count(value).alias("count"),
        F.approx_count_distinct(value, 0.02).alias("distinct"),
        F.min(value).alias("low"),
        F.max(value).alias("high"),
        F.percentile_approx(value, list(_SHARES), 2_000).alias("quantiles"),
        F.coalesce(has_hours, F.lit(False)).alias("has_hours"),
    )


def local_seconds(value: SparkColumn, type_name: str) -> SparkColumn:
    """Returns seconds since 1970 on the clock of the session's time zone, as a double."""
    from pyspark.sql import functions as F

    if type_name == "date":
        return F.unix_date(value).cast("double") * F.lit(_DAY)
    of_day = F.hour(value) * 3600 + F.minute(value) * 60 + F.second(value)
    return F.unix_date(F.to_date(value)).cast("double") * F.lit(_DAY) + of_day


def _count_values(frame: DataFrame, leaves: Sequence[_Leaf], measures: Sequence[_Measure], rows: int) -> None:
    """Counts the strings, and the numbers that repeat, into `measures`."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    wanted = {
        index: leaf.value.cast("string")
        if leaf.family == "words"
        else leaf.value.cast("double").cast("string")
        for index, (leaf, measure) in enumerate(zip(leaves, measures, strict=True))
        if (leaf.family == "words" and not _is_id(measure))
        or (leaf.family == "number" and measure.distinct <= min(_MAX_LEVELS, max(BINS, rows // 3)))
    }
    if not wanted:
        return
    pairs = F.array(*(F.struct(F.lit(i).alias("leaf"), v.alias("value")) for i, v in wanted.items()))
    counted = (
        frame.select(F.explode(pairs).alias("pair"))
        .where(F.col("pair.value").isNotNull())
        .groupBy("pair.leaf", "pair.value")
        .agg(F.count(F.lit(1)).alias("rows"))
    )
    order = Window.partitionBy("leaf").orderBy(F.desc("rows"), "value")
    for leaf, value, count in (
        counted.withColumn("place", F.row_number().over(order))
        .where(F.col("place") <= MAX_WORDS)
        .select("leaf", "value", "rows")
        .orderBy("leaf", F.desc("rows"), "value")
        .collect()
    ):
        measures[leaf].values.append((value, count))


def _is_id(measure: _Measure) -> bool:
    return measure.count > _ID_ROWS and measure.distinct > _ID_SHARE * measure.count


def _decide(
    leaf: _Leaf, measure: _Measure, rows: int
) -> tuple[list[TableColumn], list[list[float]], str, str]:
    """Returns the columns of the row, the edges of their numbers, the use, and its reason."""
    place = {"name": leaf.name, "path": leaf.path, "item": leaf.item}
    if not measure.count:
        return [], [], "left out", "every row lacks a value"
    if leaf.family == "words":
        return _decide_words(place, measure)
    if measure.low == measure.high and measure.count == rows:
        return [], [], "left out", "every row has the same value"
    center, scale = _standard(measure)
    low, high = ((bound - center) / scale for bound in (measure.low, measure.high))
    standard: dict[str, Any] = {"center": center, "scale": scale, "low": low, "high": high}
    if leaf.family == "calendar":
        span = measure.high - measure.low
        parts = tuple(
            name for name in CALENDAR if span >= _MIN_SPAN[name] and (name != "hour" or measure.has_hours)
        )
        edges = [_edges(measure, center, scale)]
        for name in parts:
            steps = min(BINS, {"hour": 24, "weekday": 7, "monthday": 31, "yearday": 26}[name])
            edges += [np.linspace(-2.0, 2.0, steps + 1).tolist(), [-1.0, 0.0, 1.0], [-1.0, 0.0, 1.0]]
        column = TableColumn(form="calendar", parts=parts, **standard, **place)
        return [column], edges, "date", f"trend, {', '.join(parts)}" if parts else "trend"
    columns = [TableColumn(**standard, **place)]
    edges = [_edges(measure, center, scale)]
    repeated = [(float(value), count) for value, count in measure.values if count >= 3]
    if measure.distinct > BINS and sum(count for _, count in repeated) > 0.3 * measure.count:
        levels = tuple(sorted(value for value, _ in repeated if math.isfinite(value)))
        columns.append(TableColumn(form="levels", levels=levels, **place))
        return columns, edges, "number and category", f"{len(levels)} values repeat"
    return columns, edges, "number", f"{len(edges[0]) - 1} bins"


def _decide_words(
    place: dict[str, Any], measure: _Measure
) -> tuple[list[TableColumn], list[list[float]], str, str]:
    if _is_id(measure):
        what = "long texts" if measure.length > _LONG_TEXT else "an id"
        return [], [], "left out", f"almost every row has its own value, {what}"
    least = 2 if len(measure.values) > 20 else 1
    words = tuple(sorted(value for value, count in measure.values if count >= least))
    if len(words) < 2 and len(measure.values) < 2:
        return [], [], "left out", "every row has the same value"
    rare = len(measure.values) - len(words)
    reason = f"{len(words)} values" + (f", {rare} rare ones as unknown" if rare else "")
    return [TableColumn(form="words", words=words, **place)], [], "category", reason


def _standard(measure: _Measure) -> tuple[float, float]:
    """Returns the median, and the spread that a normal distribution with these quantiles would have."""
    q = np.array(measure.quantiles)
    spread = float(np.interp(0.9, _SHARES, q) - np.interp(0.1, _SHARES, q)) / 2.563
    spread = spread or float(np.std(q)) or float(measure.high - measure.low) or 1.0
    return float(np.interp(0.5, _SHARES, q)), spread


def _edges(measure: _Measure, center: float, scale: float) -> list[float]:
    """Returns the edges of a number's bins: quantiles, or the middles between its values if they are few."""
    values = sorted(float(value) for value, _ in measure.values)
    if values and len(values) <= BINS and measure.distinct <= BINS:
        points = np.array(values)
        edges = np.array([points[0], *(points[1:] + points[:-1]) / 2, points[-1]])
    else:
        edges = np.array([measure.low, *measure.quantiles[1:-1], measure.high])
    standard = np.unique(((edges - center) / scale).astype(np.float32))
    if len(standard) < 2:
        standard = np.array([standard[0] - 1, standard[0] + 1])
    return [float(edge) for edge in standard]
