"""How far the columns of new rows are from the training rows: `model.compare_inputs`.

The training counts its rows by bin of each number and by id of each name, and stores the counts with the
model. New rows are counted by the same code, so the training rows themselves have no drift.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from ringspark.estimators.columns.inputs import ModelInput
from ringspark.pipelines.job_names import name_jobs
from ringspark.pipelines.kinds import TableColumn, TableRow
from ringspark.pipelines.kinds.table_row import to_doubles
from ringspark.pipelines.local_python import choose_python
from ringspark.pipelines.rows import NumpyArray
from ringspark.pipelines.spark_errors import explain_worker_errors

# A column with more names compares groups of neighboring names, because each name would add noise.
_MOST_NAMES = 32
# Standardized numbers are clipped to this magnitude before they are summed.
_FARTHEST = 1e6


@dataclass(frozen=True, kw_only=True)
class ColumnDrift:
    """Drift of one column.

    Attributes:
        column: Name of the column, such as `column.field[3]`.
        psi: Population stability index over bins of numbers, or over names, and missing values (Siddiqi 2006,
            "Credit Risk Scorecards"). By convention, below 0.1 is small and above 0.25 is large.
        wasserstein: Wasserstein-1 distance of the numbers, in standard deviations of the training; NaN for
            names.
        missing_before, missing: Share of rows without a value, in the training and now.
        unknown_before, unknown: Share of rows with a name that has no id of its own; NaN for numbers.
    """

    column: str
    psi: float
    wasserstein: float
    missing_before: float
    missing: float
    unknown_before: float
    unknown: float


def compare_inputs(frame: DataFrame, inputs: Sequence[ModelInput], row: Column) -> pd.DataFrame:
    """Returns one row per column, the largest drift first. Runs one Spark job.

    Args:
        inputs: The inputs of a model that was trained on a table.
        row: The columns of the new rows as a struct, from `TableRow.select`.
    """
    kind = counted_table(inputs, "compare_inputs")
    choose_python(frame.sparkSession)
    with explain_worker_errors(), name_jobs(frame.sparkSession, "compare_inputs"):
        found = drifts_of(kind, count_rows(frame, kind, row))
    return pd.DataFrame([vars(drift) for drift in found])


def counted_table(inputs: Sequence[ModelInput], caller: str) -> TableRow:
    """Returns the type of a model's table; raises ValueError if it has none, or its rows were not counted."""
    kinds = [item.column.kind for item in inputs if item.column is not None]
    kind = next((each for each in kinds if isinstance(each, TableRow)), None)
    if kind is None:
        raise no_table_error(caller)
    if not all(column.counts for column in kind.columns):
        raise ValueError(
            f"{caller} needs counts of the training rows, which models of earlier versions of ringspark "
            "do not have; fit the model again"
        )
    return kind


def no_table_error(caller: str) -> ValueError:
    return ValueError(
        f"{caller} is for predictions from the columns of a table, but this stage has other inputs or no "
        "label; use TorchClassifier or TorchRegressor without a model"
    )


def count_rows(frame: DataFrame, kind: TableRow, row: Column) -> NumpyArray:
    """Returns the result of `count_batch` for the rows of a DataFrame. Runs one Spark job."""
    counts = frame.select(row.alias("row")).mapInArrow(
        partial(_count_in_task, kind), "place int, rows double, total double"
    )
    found = np.zeros((2, sum(column.num_counts for column in kind.columns)))
    for place, *sums in counts.groupBy("place").agg(F.sum("rows"), F.sum("total")).collect():
        found[:, place] = sums
    return found


def _count_in_task(kind: TableRow, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    found = np.zeros((2, sum(column.num_counts for column in kind.columns)))
    for batch in batches:
        found += count_batch(kind, batch.column(0))
    (places,) = np.nonzero(found[0])
    yield pa.RecordBatch.from_arrays(
        [pa.array(places.astype(np.int32)), *map(pa.array, found[:, places])], ["place", "rows", "total"]
    )


def count_batch(kind: TableRow, rows: pa.StructArray) -> NumpyArray:
    """Counts rows by bin or id of each column, and adds up the standardized numbers.

    Returns:
        (2, places): rows and sums, for each column in order: its bins, or its ids from 0 on, and at the end
        the rows without a value.
    """
    return np.concatenate([_count(column, rows.field(column.source)) for column in kind.columns], axis=1)


def _count(column: TableColumn, given: pa.Array) -> NumpyArray:
    if column.form == "words":
        known = given.drop_null()
        places, numbers = column.ids_of(known), np.zeros(len(known))
    else:
        values = column.clean(to_doubles(given))
        numbers = values[~np.isnan(values)]
        if column.form == "levels":
            places = column.ids_of(pa.array(numbers))
        else:
            numbers = column.standardize(numbers, -_FARTHEST, _FARTHEST)
            places = np.searchsorted(column.edges, numbers, side="right")
    size = column.num_counts
    rows = np.bincount(places, minlength=size)
    rows[-1] = len(given) - len(numbers)
    return np.stack([rows, np.bincount(places, numbers, minlength=size)])


def with_counts(kind: TableRow, counts: NumpyArray) -> TableRow:
    """Stores the counts of the training rows, a result of `count_batch`, in the columns."""
    columns = []
    for column, (rows, totals) in zip(kind.columns, _split(kind, counts), strict=True):
        means = () if column.num_ids else tuple(_divide(totals, rows)[:-1].tolist())
        columns.append(replace(column, counts=tuple(rows.astype(int).tolist()), means=means))
    return TableRow(tuple(columns))


def drifts_of(kind: TableRow, counts: NumpyArray) -> list[ColumnDrift]:
    """Returns the drift of each column, the largest first; `counts` is a result of `count_batch`."""
    found: dict[str, ColumnDrift] = {}
    for column, (rows, totals) in zip(kind.columns, _split(kind, counts), strict=True):
        if not rows.sum():
            raise ValueError("compare_inputs needs rows, got none; pass a DataFrame with rows")
        drift = _drift(column, rows, totals)
        if (other := found.get(column.title)) is not None:
            # The column's numbers are also ids.
            drift = replace(drift, psi=max(drift.psi, other.psi), wasserstein=other.wasserstein)
        found[column.title] = drift
    return sorted(found.values(), key=lambda drift: -drift.psi)


def _drift(column: TableColumn, rows: NumpyArray, totals: NumpyArray) -> ColumnDrift:
    before = np.array(column.counts, float)
    shares, shares_before = rows / rows.sum(), before / before.sum()
    distance = unknown = unknown_before = np.nan
    groups = np.arange(len(before))
    if column.num_ids:
        unknown, unknown_before = shares[0], shares_before[0]
        groups = _groups(before)
    elif rows[:-1].any() and before[:-1].any():
        distance = wasserstein(column.means, before[:-1], _divide(totals, rows)[:-1], rows[:-1])
    return ColumnDrift(
        column=column.title,
        psi=stability_index(np.bincount(groups, before), np.bincount(groups, rows)),
        wasserstein=float(distance),
        missing_before=float(shares_before[-1]),
        missing=float(shares[-1]),
        unknown_before=float(unknown_before),
        unknown=float(unknown),
    )


def _groups(counts: NumpyArray) -> NumpyArray:
    """Returns a group for each id; many names share about `_MOST_NAMES` groups of about equally many rows."""
    names = counts[1:-1]
    if len(names) <= _MOST_NAMES:
        return np.arange(len(counts))
    middles = (names.cumsum() - names / 2) / max(1, names.sum())
    of_names = np.unique((middles * _MOST_NAMES).astype(int), return_inverse=True)[1] + 1
    return np.array([0, *of_names, of_names.max() + 1])


def stability_index(before: NumpyArray, now: NumpyArray) -> float:
    """Returns the population stability index of two lists of counts.

    Half a row is added to each count, because the logarithm of an empty bin would be infinite.
    """
    p, q = ((counts + 0.5) / (counts + 0.5).sum() for counts in (before, now))
    return float(((q - p) * np.log(q / p)).sum())


def wasserstein(
    points: Sequence[float], weights: NumpyArray, other_points: NumpyArray, other_weights: NumpyArray
) -> float:
    """Returns the Wasserstein-1 distance of two weighted lists of numbers."""
    places: NumpyArray = np.concatenate([points, other_points])
    steps = np.concatenate([weights / weights.sum(), -other_weights / other_weights.sum()])
    order = np.argsort(places, kind="stable")
    return float((np.abs(np.cumsum(steps[order])[:-1]) * np.diff(places[order])).sum())


def _divide(totals: NumpyArray, rows: NumpyArray) -> NumpyArray:
    return totals / np.maximum(rows, 1)


def _split(kind: TableRow, counts: NumpyArray) -> Iterable[NumpyArray]:
    ends = np.cumsum([column.num_counts for column in kind.columns])[:-1]
    return np.split(counts, ends, axis=1)
