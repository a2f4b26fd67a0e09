"""Measures the columns of a table in Spark, for `table_plan`.

One job measures numbers and dates, and a second one counts the strings and the numbers that repeat. Spark
aggregates: the driver receives quantiles and the frequent values, whatever the number of rows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql.types import DataType

from ringspark.pipelines.columns import quote
from ringspark.pipelines.kinds.table_row import (
    double_of,
    is_number,
    items_of_vector,
    local_seconds,
    time_of,
    title_of,
    try_cast,
)
from ringspark.pipelines.rows import NumpyArray

MAX_ITEMS = 1_024
MAX_VALUES = 20_000
"""Largest number of values per column whose counts are kept, the most frequent values first."""

FEW_TEXTS = 20
"""Up to this many distinct texts are categories, even if each text is a number."""

_BLANKS = ("", "na", "n/a", "#n/a", "<na>", "null", "none", "?", "-", ".")
"""Texts, in lower case, of missing numbers and times; a double may also be "nan"."""

LARGEST = 1e300
"""Larger numbers, of either sign, count as this one."""

FOLDS = 5
QUANTILES = tuple(np.linspace(0.0, 1.0, 129).tolist())
TAILS = (0.0005, 0.002, 0.005, 0.01, 0.02)
"""Shares of the rows in a tail, at which quantiles are measured on both sides of a column."""

# Bounds the values that the driver receives, and the pairs of row and column that are counted.
_MAX_COLLECTED, _MAX_PAIRS = 1_000_000, 30_000_000
# Spark sorts the pairs if it aggregates for more than 128 columns.
_COLUMNS_PER_JOB = 100
_DAY = 86_400.0


@dataclass(frozen=True)
class Leaf:
    """One value per row: a column, a field of a struct, or an item of an array.

    Attributes:
        type: Spark type of the column.
        value: The value: a double, a string, or a date or timestamp.
        path: Fields inside a struct.
        item: Index in an array or vector.
        length: Number of items of the array or vector.
        family: "number", "words" or "calendar".
        source: The value itself, if it is a text, or may have more digits than a double.
        origin: Number that was subtracted from the value.
        day_first: Whether dates such as "4/12/2020" begin with the day.
    """

    name: str
    type: str
    value: Any
    path: tuple[str, ...] = ()
    item: int | None = None
    length: int | None = None
    family: str = "number"
    source: Any = None
    origin: int = 0
    day_first: bool = False

    @property
    def title(self) -> str:
        return title_of(self.name, self.path, self.item)


@dataclass
class Measure:
    """Statistics of one leaf over the training rows.

    Attributes:
        count: Number of rows with a value; NaN and infinite numbers do not count.
        quantiles: Quantiles at the shares `QUANTILES`.
        tails: Quantiles at the shares `TAILS`, then at 1 minus them.
        correlation: Correlation with the target.
        is_beyond: Whether every held-out value lies above all training values.
        numbers, times, blanks: Number of rows whose text is a number, a date or timestamp, or in `_BLANKS`.
        times_by_day: Number of rows whose text is a date or timestamp if days come first.
        values: For each value, an array (2, FOLDS + 1): number of rows and sum of the target, in each random
            fold of the training rows and in the held-out rows.
    """

    count: int = 0
    distinct: int = 0
    low: float = math.nan
    high: float = math.nan
    quantiles: list[float] = field(default_factory=list)
    tails: list[float] = field(default_factory=list)
    correlation: float = 0.0
    is_beyond: bool = False
    length: float = 0.0
    has_hours: bool = False
    numbers: int = 0
    times: int = 0
    times_by_day: int = 0
    blanks: int = 0
    values: dict[str, NumpyArray] = field(default_factory=dict)

    def repeats(self, least: int) -> list[str]:
        """Returns the values that occur in at least `least` of the counted rows."""
        return [value for value, sums in self.values.items() if sums[0, :FOLDS].sum() >= least]

    def explained(self, groups: Sequence[int] | None = None) -> float:
        """Returns the share of the target's variance that the column's value explains.

        The prediction for a row is the mean target of rows with an equal value in the other folds
        (Micci-Barreca 2001), and of five added rows with the overall mean. `groups` has a number per value;
        values with the same number count as equal.
        """
        if not self.values:
            return 0.0
        rows, target = self._sums(groups)[..., :FOLDS].swapaxes(0, 1)
        others = (target.sum(1, keepdims=True) - target) / (rows.sum(1, keepdims=True) - rows + 5.0)
        return float((2 * others * target - others**2 * rows).sum() / max(rows.sum(), 1.0))

    def explained_held(self, groups: Sequence[int] | None = None) -> float:
        """Returns the share of the target's variance that the value explains in held-out rows.

        Predicts from the training rows. A different mean of the target, common in newer rows, is ignored.
        """
        if not self.values:
            return 0.0
        rows, target = self._sums(groups).swapaxes(0, 1)
        held, held_target = rows[:, FOLDS], target[:, FOLDS]
        count = max(held.sum(), 1.0)
        means = target[:, :FOLDS].sum(1) / (rows[:, :FOLDS].sum(1) + 5.0)
        means -= (means * held).sum() / count
        held_target = held_target - held * held_target.sum() / count
        return float((2 * means * held_target - means**2 * held).sum() / count)

    def _sums(self, groups: Sequence[int] | None) -> NumpyArray:
        """Returns the arrays of `values`, added up by group if there are groups: (N, 2, FOLDS + 1)."""
        sums = np.array(list(self.values.values()))
        if groups is None:
            return sums
        joined = np.zeros((max(groups) + 1, *sums.shape[1:]))
        np.add.at(joined, list(groups), sums)
        return joined


def find_leaves(
    frame: DataFrame, names: Iterable[str], refused: dict[str, tuple[str, str]]
) -> Iterator[Leaf]:
    """Yields every `Leaf` of the columns; adds unusable columns to `refused` as name -> (type, reason)."""

    def leaves_of(
        name: str, path: tuple[str, ...], data_type: DataType, value: SparkColumn
    ) -> Iterator[Leaf]:
        simple, family = data_type.simpleString(), data_type.typeName().split("(")[0].split(" ")[0]
        if is_number(simple):
            yield Leaf(name, simple, double_of(value, family), path, source=_exact(value, simple))
        elif simple == "boolean" or family in ("string", "varchar", "char"):
            source = None if simple == "boolean" else value
            yield Leaf(name, simple, value.cast("string"), path, family="words", source=source)
        elif family in ("date", "timestamp", "timestamp_ntz"):
            yield Leaf(name, simple, local_seconds(value, simple), path, family="calendar")
        elif family == "struct":
            for inner in data_type.fields:  # type: ignore[attr-defined]
                yield from leaves_of(name, (*path, inner.name), inner.dataType, value.getField(inner.name))
        elif simple == "vector" or (family == "array" and _is_countable(data_type.elementType)):  # type: ignore[attr-defined]
            yield from items_of(name, path, simple, value)
        else:
            refused[".".join((name, *path))] = simple, "a network for tables cannot take this type"

    def items_of(name: str, path: tuple[str, ...], simple: str, array: SparkColumn) -> Iterator[Leaf]:
        if simple == "vector":
            array = items_of_vector(array)
        # The size of a null array is -1 or null, by Spark's settings.
        size = F.when(array.isNotNull(), F.size(array))
        low, high = frame.agg(F.min(size), F.max(size)).head() or (None, None)
        if not high or low != high or high > MAX_ITEMS:
            reason = (
                f"rows hold {low} to {high} numbers; all rows must hold equally many, at most {MAX_ITEMS}"
            )
            refused[".".join((name, *path))] = simple, reason if high else "every row lacks a value"
            return
        kind = simple.removeprefix("array<").removesuffix(">")
        for item in range(high):
            value = F.get(array, F.lit(item))
            yield Leaf(name, simple, value.cast("double"), path, item, high, source=_exact(value, kind))

    for name in names:
        yield from leaves_of(name, (), frame.schema[name].dataType, F.col(quote(name)))


def _is_countable(data_type: DataType) -> bool:
    return is_number(simple := data_type.simpleString()) or simple == "boolean"


def _exact(value: SparkColumn, simple: str) -> SparkColumn | None:
    """Returns a value that may have more digits than a double, as a decimal; None for other types."""
    if simple == "bigint":
        return value.cast("decimal(38,0)")
    return value if simple.startswith("decimal") else None


def measure(
    frame: DataFrame, leaves: Sequence[Leaf], held: SparkColumn, target: SparkColumn
) -> tuple[int, int, list[Measure]]:
    """Returns the numbers of training rows and of held-out rows, and the statistics of each leaf.

    See `plan_table` for `held` and `target`.
    """
    measures = [Measure() for _ in leaves]
    rows = rows_held = 0
    for start in range(0, len(leaves), _COLUMNS_PER_JOB):
        # Pairs of leaf and value: with an aggregate per column, the plan of a wide table takes minutes.
        pairs = F.array(
            *(
                F.struct(F.lit(index).alias("leaf"), _number(leaf).alias("number"), _word(leaf).alias("word"))
                for index, leaf in enumerate(leaves[start : start + _COLUMNS_PER_JOB], start)
            )
        )
        exploded = frame.select(held.alias("held"), target.alias("target"), F.explode(pairs).alias("pair"))
        for found in exploded.groupBy("pair.leaf").agg(*_statistics()).collect():
            row = {key: value for key, value in found.asDict().items() if value is not None}
            index, rows, rows_held = row.pop("leaf"), row.pop("rows"), row.pop("held")
            lowest_held = row.pop("lowest_held", None)
            # Differences and sums of two larger doubles may be infinite.
            for name in {"low", "high", "quantiles", "tails"} & row.keys():
                row[name] = np.clip(row[name], -LARGEST, LARGEST).tolist()
            measures[index] = Measure(**row)
            measures[index].is_beyond = lowest_held is not None and lowest_held > measures[index].high
    return rows, rows_held, measures


def _statistics() -> list[SparkColumn]:
    held, finite, word = F.col("held"), F.col("pair.number"), F.col("pair.word")
    number = F.when(~held, finite)
    shares = [*QUANTILES, *TAILS, *(1 - share for share in TAILS)]
    quantiles = F.percentile_approx(number, shares, 4_000)
    has_value = ~held & (finite.isNotNull() | word.isNotNull())
    return [
        F.count(F.when(~held, F.lit(1))).alias("rows"),
        F.count(F.when(held, F.lit(1))).alias("held"),
        F.count(F.when(has_value, F.lit(1))).alias("count"),
        F.approx_count_distinct(F.when(has_value, F.xxhash64(finite, word)), 0.02).alias("distinct"),
        F.min(number).alias("low"),
        F.max(number).alias("high"),
        F.slice(quantiles, 1, len(QUANTILES)).alias("quantiles"),
        F.slice(quantiles, len(QUANTILES) + 1, 2 * len(TAILS)).alias("tails"),
        F.corr(number, F.col("target")).alias("correlation"),
        F.min(F.when(held, finite)).alias("lowest_held"),
        F.coalesce(F.max(F.pmod(number, F.lit(_DAY))) > 0, F.lit(False)).alias("has_hours"),
        F.avg(F.when(~held, F.length(word))).alias("length"),
        # A leading zero is part of a code, such as a postcode.
        F.count(F.when(~held & ~word.rlike("^0[0-9]"), try_cast(word, "double"))).alias("numbers"),
        F.count(F.when(~held, time_of(word, "UTC"))).alias("times"),
        F.count(F.when(~held, time_of(word, "UTC", True))).alias("times_by_day"),
        F.count(F.when(~held & F.lower(F.trim(word)).isin(*_BLANKS), F.lit(1))).alias("blanks"),
    ]


def measure_again(
    frame: DataFrame,
    leaves: list[Leaf],
    measures: list[Measure],
    held: SparkColumn,
    target: SparkColumn,
    zone: str,
) -> None:
    """Replaces leaves of numbers with more digits than a double, and of text with numbers or times.

    Measures them again. Runs jobs only if there are such leaves. `zone` is the clock of times without a zone.
    """
    found: dict[int, Leaf] = {}
    exact: dict[int, SparkColumn] = {}
    for index, (leaf, measured) in enumerate(zip(leaves, measures, strict=True)):
        if leaf.source is None or not measured.count:
            continue
        if leaf.family == "number" and _lacks_digits(leaf, measured):
            found[index], exact[index] = leaf, leaf.source
        elif leaf.family == "words" and measured.distinct > FEW_TEXTS:
            texts = measured.count - measured.blanks
            if measured.numbers == texts:
                found[index] = replace(leaf, value=double_of(leaf.source, "string"), family="number")
                exact[index] = try_cast(leaf.source, "decimal(38,0)")
            elif texts in (measured.times, measured.times_by_day):
                by_day = measured.times < texts
                time = local_seconds(time_of(leaf.source, zone, by_day), "timestamp")
                found[index] = replace(leaf, value=time, family="calendar", day_first=by_day)
    if exact:
        # The median is near most values; the minimum may be a code for a missing value.
        trained = (F.when(~held, each) for each in exact.values())
        middles = frame.agg(*(F.percentile_approx(each, 0.5) for each in trained)).head()
        assert middles is not None
        for index, middle in zip(exact, middles, strict=True):
            leaf, origin = found[index], int(middle or 0)
            is_text = leaves[index].family == "words"
            if not is_text or abs(origin) > 2**53:
                kind = "string" if is_text else "decimal"
                found[index] = replace(leaf, value=double_of(leaf.source, kind, origin), origin=origin)
    if found:
        again = measure(frame, list(found.values()), held, target)[2]
        for index, measured in zip(found, again, strict=True):
            leaves[index], measures[index] = found[index], measured


def _lacks_digits(leaf: Leaf, measured: Measure) -> bool:
    """Whether a leaf has whole numbers beyond 2^53, or long decimals that lie close together."""
    scale = int(leaf.type.rstrip(">)").rpartition(",")[2]) if "decimal" in leaf.type else 0
    largest, quantiles = max(abs(measured.low), abs(measured.high)), measured.quantiles
    # A long decimal often ends in zeros; a double is then exact enough unless the values lie close together.
    is_narrow = quantiles[-13] - quantiles[12] < largest * 2**-30
    return largest * 10.0**scale > 2**53 and (not scale or is_narrow)


def _number(leaf: Leaf) -> SparkColumn:
    if leaf.family == "words":
        return F.lit(None).cast("double")
    return F.when(~F.isnan(leaf.value) & (F.abs(leaf.value) < F.lit(math.inf)), leaf.value)


def _word(leaf: Leaf) -> SparkColumn:
    return leaf.value if leaf.family == "words" else F.lit(None).cast("string")


def count_values(
    frame: DataFrame,
    leaves: Sequence[Leaf],
    measures: Sequence[Measure],
    rows: int,
    held: SparkColumn,
    target: SparkColumn,
) -> None:
    """Counts the strings and numbers of each leaf, and stores the frequent ones in `Measure.values`.

    Skips dates and leaves whose values hardly repeat. Of a large table, it counts a random sample. `rows` is
    the number of rows of the table; See `plan_table` for `held` and `target`.
    """
    wanted = {
        index: (leaf.value if leaf.family == "words" else _number(leaf)).cast("string")
        for index, (leaf, measured) in enumerate(zip(leaves, measures, strict=True))
        if leaf.family != "calendar" and measured.count and not is_unique(measured)
    }
    if not wanted:
        return
    share = min(1.0, _MAX_PAIRS / max(1, rows * len(wanted)))
    if share < 1:
        frame = frame.sample(share, 0)
    folds = range(FOLDS + 1)
    most = max(256, min(MAX_VALUES, _MAX_COLLECTED // len(wanted)))
    pairs = F.array(*(F.struct(F.lit(i).alias("leaf"), v.alias("value")) for i, v in wanted.items()))
    counted = (
        frame.select(
            target.alias("target"),
            F.when(held, FOLDS).otherwise(F.floor(F.rand(0) * FOLDS)).cast("int").alias("fold"),
            F.explode(pairs).alias("pair"),
        )
        .where(F.col("pair.value").isNotNull())
        .groupBy("pair.leaf", "pair.value")
        .agg(
            F.count(F.when(F.col("fold") < FOLDS, 1)).alias("rows"),
            *(F.count(F.when(F.col("fold") == fold, 1)).alias(f"rows{fold}") for fold in folds),
            *(F.sum(F.when(F.col("fold") == fold, F.col("target"))).alias(f"t{fold}") for fold in folds),
        )
        .where(F.col("rows") > 0)
    )
    order = Window.partitionBy("leaf").orderBy(F.desc("rows"), "value")
    found: dict[int, dict[str, NumpyArray]] = defaultdict(dict)
    for leaf, value, _, *sums in (
        counted.withColumn("place", F.row_number().over(order))
        .where(F.col("place") <= most)
        .drop("place")
        .orderBy("leaf", F.desc("rows"), "value")
        .collect()
    ):
        found[leaf][value] = np.array(sums, dtype=np.float64).reshape(2, FOLDS + 1)
    for leaf, values in found.items():
        # A sum without rows is null.
        measures[leaf].values = {value: np.nan_to_num(sums) for value, sums in values.items()}


def is_unique(measured: Measure) -> bool:
    """Whether almost every row has its own value, so that values say nothing about other rows."""
    return measured.count > 100 and measured.distinct > 0.9 * measured.count
