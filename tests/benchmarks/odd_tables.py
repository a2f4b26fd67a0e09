"""Odd tables: seconds of `fit` and `transform` of tables with many partitions, files or columns.

Each table is compared with a plain Spark job over the same rows in the same round: a map in Arrow that
counts them. "small" has 303 rows in two partitions; its first fit starts the Python workers of the session.

    python tests/benchmarks/odd_tables.py --only wide --columns 5000 --rows 400 --repeats 1
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from statistics import median
from typing import TYPE_CHECKING, Any

import harness
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from ringspark.estimators import TorchRegressor
from ringspark.jobs import cli

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Few rows, so that only the number of partitions counts.
PARTITIONED_ROWS = 303
TABLES = ("small", "partitions", "files", "wide")


class Wide(nn.Module):
    """Takes each column as an argument: `columns` tensors of shape (batch,)."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(columns, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, *columns: torch.Tensor) -> torch.Tensor:
        """Returns (batch, 1)."""
        return self.layers(torch.stack(columns, dim=1))  # type: ignore[no-any-return]


def count_rows(batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
    """Yields the number of rows of each batch."""
    for batch in batches:
        yield pa.RecordBatch.from_pydict({"rows": [batch.num_rows]})


def wide_table(spark: SparkSession, columns: int, rows: int, folder: str) -> DataFrame:
    """Returns a table of `columns` numbers and a label in two Parquet files."""
    random = np.random.default_rng(0)
    values = {f"x{i}": random.random(rows, np.float32) for i in range(columns)}
    table = pa.table(values | {"label": values["x0"] - values["x1"]})
    half = (rows + 1) // 2
    for part in range(2):
        pq.write_table(table.slice(part * half, half), f"{folder}/part-{part}.parquet")
    return spark.read.parquet(folder)


def table_of_files(spark: SparkSession, files: int, rows: int, folder: str) -> DataFrame:
    """Returns a table of four numbers and a label in `files` Parquet files of equal size."""
    random = np.random.default_rng(0)
    per_file = rows // files
    for number in range(files):
        values = {f"x{i}": random.random(per_file, np.float32) for i in range(4)}
        table = pa.table(values | {"label": values["x0"] - values["x1"]})
        pq.write_table(table, f"{folder}/part-{number:05}.parquet")
    return spark.read.parquet(folder)


def cases(name: str, frame: DataFrame, settings: dict[str, Any]) -> dict[str, Callable[[], float]]:
    """Returns the measured steps of one table."""
    shared = {"numWorkers": harness.NUM_WORKERS, "batchSize": 256, "showProgress": False, "seed": 0}
    estimator = TorchRegressor(**(shared | settings))
    fitted: list[Any] = []

    def plain() -> None:
        frame.mapInArrow(count_rows, "rows long").collect()

    def fit() -> None:
        fitted[:] = [estimator.fit(frame)]

    def transform() -> None:
        fitted[0].transform(frame).select("prediction").collect()

    return {
        f"{name}: {step.__name__}": lambda step=step: harness.seconds_of(step)  # type: ignore[misc]
        for step in (plain, fit, transform)
    }


def main() -> None:
    """Measures the first fit of the session, then the tables in interleaved rounds after a warm-up round."""
    parser = harness.parser(
        __doc__,
        rows=(5_000, 100),
        columns=(1_000, 40),
        partitions=(2_000, 70),
        files=(2_000, 5),
        file_rows=(200_000, 50),
    )
    parser.add_argument("--only", choices=TABLES, help="only this table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, cli.spark("ringspark odd tables", harness.MASTER) as spark:
        small = harness.random_frame(spark, PARTITIONED_ROWS).cache()
        small.count()
        shared = {"model": harness.MLP, "storageUri": folder}
        measured = cases("small", small, shared)
        first = measured["small: fit"]()
        if options.only in (None, "partitions"):
            many = small.repartition(options.partitions).cache()
            many.count()
            measured |= cases("partitions", many, shared)
        if options.only in (None, "files"):
            files = table_of_files(spark, options.files, options.file_rows, tempfile.mkdtemp(dir=folder))
            given = {
                "inputCols": files.columns[:-1],
                "model": Wide(4),
                "storageUri": folder,
                "batchSize": 2048,
            }
            measured |= cases("files, copied", files, given)
            measured |= cases("files, in place", files, given | {"data": "inPlace"})
        if options.only in (None, "wide"):
            wide = wide_table(spark, options.columns, options.rows, tempfile.mkdtemp(dir=folder))
            inputs = {"inputCols": wide.columns[:-1], "model": Wide(options.columns)}
            measured |= cases("wide", wide, {"storageUri": folder} | inputs)
        seconds = harness.measure_in_turns(measured, options.repeats)
    rows = [["small: first fit of the session", f"{first:.1f}", "", "", ""]]
    for name, values in seconds.items():
        plain = seconds[f"{name.split(':')[0]}: plain"]
        ratio = f"{harness.median_ratio(values, plain):.2f}"
        rows.append([name, *(f"{value:.1f}" for value in (median(values), min(values), max(values))), ratio])
    sizes = (
        f"{options.partitions:,} partitions with {PARTITIONED_ROWS} rows, {options.files:,} files with "
        f"{options.file_rows:,} rows, {options.columns:,} columns with {options.rows:,} rows"
    )
    harness.print_table(
        f"odd_tables: seconds; {sizes}; {harness.MASTER}, {options.repeats} rounds",
        ["", "median", "min", "max", "of plain"],
        rows,
    )


if __name__ == "__main__":
    main()
