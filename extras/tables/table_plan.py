"""Decides how each column of a table becomes network input, from the statistics of `table_statistics`."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from ringspark.extras.tables.drift import count_rows, with_counts
from ringspark.extras.tables.table_statistics import (
    FOLDS,
    LARGEST,
    QUANTILES,
    TAILS,
    Leaf,
    Measure,
    count_values,
    find_leaves,
    is_unique,
    measure,
    measure_again,
)
from ringspark.pipelines.column_use import ColumnUse
from ringspark.pipelines.kinds import kind_from_json
from ringspark.pipelines.kinds.table_row import CALENDAR, NULL_WORD, TableColumn, TableRow, zone_name
from ringspark.pipelines.rows import NumpyArray
from ringspark.pipelines.typed_json import parse_object, record

BINS = 32

# With fewer rows in a tail, its values would decide predictions far from all other rows.
_TAIL_ROWS = 8
_LONG_TEXT = 60
_DAY = 86_400.0
# Each season must come twice, or it looks like a trend.
_MIN_SPAN = {"hour": 0.0, "weekday": 8 * _DAY, "monthday": 45 * _DAY, "yearday": 500 * _DAY}
_STEPS = {"hour": 24, "weekday": 7, "monthday": 31, "yearday": 26}
_LEAK = 0.98
_MAX_COUNTED = 1_000_000
_FAR = 1e6


@dataclass(frozen=True, kw_only=True)
class TablePlan:
    """How the columns of a table become network input.

    Attributes:
        kind: Column type that makes the numbers and ids of each row.
        edges: For each standardized number, ascending edges of the bins by which the network encodes it.
        uses: How the plan uses each column.
        rows: Number of training rows.
        outputs: Arguments of the network that depend on the label.
        asked: What the user asked for: task, label and columns.
    """

    kind: TableRow
    edges: list[list[float]]
    uses: list[ColumnUse]
    rows: int
    outputs: dict[str, Any] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(vars(self) | {"kind": self.kind.to_json()}, default=vars)

    @classmethod
    def from_json(cls, text: str | bytes) -> TablePlan:
        """Reads a result of `to_json`; raises ValueError for anything else."""
        values = parse_object(text)
        kind = kind_from_json(values.pop("kind", None) or {})
        if not isinstance(kind, TableRow):
            raise ValueError("'kind' must be 'table_row'")
        return record(cls, {**values, "kind": kind})


@dataclass
class _Choice:
    """How the plan uses one column, struct field or array item; see `ColumnUse`."""

    use: str
    reason: str
    columns: tuple[TableColumn, ...] = ()
    edges: tuple[list[float], ...] = ()


def plan_table(
    frame: DataFrame,
    names: Sequence[str],
    held: SparkColumn,
    target: SparkColumn,
    monotone: Collection[str] = (),
) -> TablePlan:
    """Returns the plan for the columns `names` of a DataFrame. Runs a few Spark jobs.

    Args:
        held: Whether a row is held out. Held-out rows show whether a number is an id, and whether its values
            keep growing beyond the training values.
        target: The label as a number of mean 0 and variance 1.
        monotone: Columns that must not become ids.

    Raises:
        ValueError: There are no training rows, no held-out rows, or no useful columns.
    """
    zone = str(frame.sparkSession.conf.get("spark.sql.session.timeZone"))
    refused: dict[str, tuple[str, str]] = {}
    leaves = list(find_leaves(frame, names, refused))
    # Without leaves, the error below names the refused columns.
    rows, rows_held, measures = measure(frame, leaves, held, target) if leaves else (1, 1, [])
    if not rows or not rows_held:
        raise ValueError(
            f"the table has {rows + rows_held} rows, {rows} to train on and {rows_held} held out; "
            "each part needs a row; give more rows, or another validationFraction or validationIndicatorCol"
        )
    measure_again(frame, leaves, measures, held, target, zone_name(zone))
    count_values(frame, leaves, measures, rows + rows_held, held, target)
    uses = [
        ColumnUse(column=name, type=simple, distinct=None, missing=0.0, use="left out", reason=reason)
        for name, (simple, reason) in refused.items()
    ]
    columns: list[TableColumn] = []
    edges: list[list[float]] = []
    for leaf, measured in zip(leaves, measures, strict=True):
        choice = _choose(leaf, measured, rows, zone, leaf.name in monotone)
        columns += choice.columns
        edges += choice.edges
        # Few rows agree with anything. The correlation of huge numbers is unknown.
        correlation = measured.correlation if math.isfinite(measured.correlation) else 0.0
        leaks = rows >= 100 and max(correlation**2, measured.explained()) > _LEAK
        uses.append(
            ColumnUse(
                column=leaf.title,
                type=leaf.type,
                distinct=measured.distinct,
                missing=round(1 - measured.count / rows, 6),
                use=choice.use,
                reason=choice.reason,
                leaks=leaks and bool(choice.columns),
            )
        )
    if not columns:
        left_out = "; ".join(f"{use.column!r}: {use.reason}" for use in uses[:3])
        raise ValueError(f"no column of the table is of use to a network ({left_out}); give other columns")
    return TablePlan(
        kind=count_table(frame, held, TableRow(tuple(columns)), rows), edges=edges, uses=uses, rows=rows
    )


def count_table(frame: DataFrame, held: SparkColumn, kind: TableRow, rows: int) -> TableRow:
    """Stores the numbers of training rows by value in `kind`. Counts a random sample of a large table."""
    counted = frame.where(~held)
    if rows > _MAX_COUNTED:
        counted = counted.sample(_MAX_COUNTED / rows, 0)
    table = StructType([frame.schema[name] for name in kind.sources])
    return with_counts(kind, count_rows(counted, kind, kind.select(None, table)))


def _choose(leaf: Leaf, measured: Measure, rows: int, zone: str, is_monotone: bool) -> _Choice:
    place: dict[str, Any] = {
        "name": leaf.name, "path": leaf.path, "item": leaf.item, "length": leaf.length,
        "type": leaf.type, "origin": leaf.origin, "day_first": leaf.day_first,
    }  # fmt: skip
    is_text = leaf.type.startswith(("string", "varchar", "char"))
    if leaf.type == "timestamp" or (is_text and leaf.family == "calendar"):
        place["zone"] = zone_name(zone)
    if not measured.count:
        return _Choice("left out", "every row lacks a value")
    if leaf.family == "words":
        return _choose_words(place, measured, rows)
    if measured.low == measured.high and measured.count == rows:
        return _Choice("left out", "every row has the same value")
    center, scale = _standard(measured)
    low, high = (measured.low, measured.high) if leaf.family == "calendar" else _clip(measured)
    # Beyond, float32 cannot distinguish numbers: the largest double often marks a missing value.
    low, high = max(low, center - _FAR * scale), min(high, center + _FAR * scale)
    standard: dict[str, Any] = {
        "center": center,
        "scale": scale,
        "low": (low - center) / scale,
        "high": (high - center) / scale,
    }
    edges = _edges(measured, center, scale, low, high)
    if leaf.family == "calendar":
        return _choose_date(measured, place, standard, edges)
    if measured.is_beyond:
        return _Choice("left out", "every held-out value lies above all training values")
    standard["edges"] = tuple(edges[1:-1])
    column, bins = TableColumn(**standard, **place), f"{len(edges) - 1} bins"
    bins = f"text of numbers, {bins}" if is_text else bins
    if not is_monotone and _is_id_in_disguise(measured):
        levels = tuple(sorted(float(value) for value in measured.repeats(2)))
        ids = TableColumn(form="levels", levels=levels, **place)
        return _Choice("number and category", f"{bins}, {len(levels)} ids", (column, ids), (edges,))
    return _Choice("number", bins, (column,), (edges,))


def _choose_date(
    measured: Measure, place: dict[str, Any], standard: dict[str, Any], trend: list[float]
) -> _Choice:
    span = measured.high - measured.low
    parts = tuple(
        name for name in CALENDAR if span >= _MIN_SPAN[name] and (name != "hour" or measured.has_hours)
    )
    edges = [] if measured.is_beyond else [trend]
    for name in parts:
        edges += [np.linspace(-2.0, 2.0, _STEPS[name] + 1).tolist(), [-1.0, 0.0, 1.0], [-1.0, 0.0, 1.0]]
    standard["edges"] = tuple(trend[1:-1])
    column = TableColumn(form="calendar", parts=parts, has_trend=not measured.is_beyond, **standard, **place)
    found = [*(["trend"] if column.has_trend else []), *parts]
    if not found:
        return _Choice("left out", "every held-out row is later than all training rows")
    return _Choice("date", ", ".join(found), (column,), tuple(edges))


def _choose_words(place: dict[str, Any], measured: Measure, rows: int) -> _Choice:
    if is_unique(measured):
        what = "long texts" if measured.length > _LONG_TEXT else "an id"
        return _Choice("left out", f"almost every row has its own value, {what}")
    words = tuple(sorted(measured.repeats(2 if len(measured.values) > 20 else 1)))
    if rows - measured.count >= 2:
        words = (*words, NULL_WORD)
    if len(words) < 2 and len(measured.values) < 2:
        return _Choice("left out", "every row has the same value")
    known = len(words) - (NULL_WORD in words)
    rare = max(measured.distinct, len(measured.values)) - known
    reason = f"{known} values" + (f", about {rare} rare ones as unknown" if rare > 0 else "")
    return _Choice("category", reason, (TableColumn(form="words", words=words, **place),))


def _is_id_in_disguise(measured: Measure) -> bool:
    """Whether a number is an id: its exact value predicts the target better than its bin of neighbors.

    This must hold in held-out rows too, which do not repeat the measurements of one day (e.g. a humidity).
    """
    if measured.distinct <= BINS or not measured.repeats(2):
        return False
    # Neighbors share a bin, also if there are few values.
    step = max(1, math.ceil(4 * (len(QUANTILES) - 1) / len(measured.values)))
    edges = np.unique(measured.quantiles[step:-step:step])
    groups = np.searchsorted(edges, [float(value) for value in measured.values], side="right").tolist()
    smooth = max(0.0, measured.explained(groups))
    rows = sum(sums[0, :FOLDS].sum() for sums in measured.values.values())
    # The second term is the noise of the estimate.
    is_alike = measured.explained() > smooth + 0.01 + 30 / rows
    return is_alike and measured.explained_held() > measured.explained_held(groups)


def _standard(measured: Measure) -> tuple[float, float]:
    """Returns the median of a number, and its standard deviation as estimated from its quantiles."""
    q: NumpyArray = np.array(measured.quantiles)
    spread = float(np.interp(0.9, QUANTILES, q) - np.interp(0.1, QUANTILES, q)) / 2.563
    middle, unit = float(np.interp(0.5, QUANTILES, q)), float(np.ptp(q)) or 1.0  # its square may be infinite
    return middle, spread or float(np.std((q - middle) / unit)) * unit or measured.high - measured.low or 1.0


def _clip(measured: Measure) -> tuple[float, float]:
    """Returns the numbers beyond which about `_TAIL_ROWS` rows lie on each side."""
    share = _TAIL_ROWS / measured.count
    middle = len(TAILS)
    low = float(np.interp(share, (0.0, *TAILS), (measured.low, *measured.tails[:middle])))
    high = float(np.interp(share, (0.0, *TAILS), (measured.high, *measured.tails[middle:])))
    return (low, high) if low < high else (measured.low, measured.high)


def _edges(measured: Measure, center: float, scale: float, low: float, high: float) -> list[float]:
    """Returns the edges of a number's bins: quantiles, or midpoints between its values if there are few."""
    values = sorted({min(max(float(value), -LARGEST), LARGEST) for value in measured.values})
    if values and len(values) <= BINS and measured.distinct <= BINS:
        points: NumpyArray = np.array(values)
        edges = np.array([points[0], *(points[1:] + points[:-1]) / 2, points[-1]])
    else:
        inner = measured.quantiles[4:-4:4]
        edges = np.array([low, *(edge for edge in inner if low < edge < high), high])
    standard = np.unique(((edges - center) / scale).astype(np.float32))
    standard = standard[np.isfinite(standard)]
    if len(standard) < 2:
        standard = np.array([standard[0] - 1, standard[0] + 1])
    return [float(edge) for edge in standard]
