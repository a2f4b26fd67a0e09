"""Odd tables: seconds of a whole `fit` and `transform` of tables with many tiny partitions or many columns.

Each table is compared with a plain Spark job of the same shape in the same round: a map in Arrow over all
columns, which returns the number of rows. "small" is a plain table of the same rows, for the launch overhead.
Options: `--repeats`, `--partitions`, `--columns`, `--rows` of the table of many columns.

    python tests/benchmarks/odd_tables.py --columns 5000 --rows 400 --partitions 2 --repeats 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import harness
import pyarrow as pa

from ringspark.estimators import TorchModel, TorchRegressor
from ringspark.models import ModelSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Few rows in all, so that only the number of partitions counts.
PARTITIONED_ROWS = 303


def count_rows(batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
    """Yields one row per batch: its number of rows."""
    for batch in batches:
        yield pa.RecordBatch.from_pydict({"rows": [batch.num_rows]})


def wide_frame(spark: SparkSession, columns: int, rows: int, folder: str) -> DataFrame:
    """Returns a table of `columns` scalar columns and a label, read from Parquet files."""
    import numpy as np
    import pyarrow.parquet as pq

    numbers = np.random.default_rng(0)
    values = {f"x{i}": numbers.random(rows, np.float32) for i in range(columns)}
    table = pa.table(values | {"label": values["x0"] - values["x1"]})
    half = (rows + 1) // 2
    for part in range(2):
        pq.write_table(table.slice(part * half, half), f"{folder}/part-{part}.parquet")
    return spark.read.parquet(folder)


def estimator(columns: list[str], folder: str) -> TorchRegressor:
    """Returns an estimator of one epoch with two workers."""
    spec = ModelSpec("mlp", {"in_features": len(columns), "hidden": [32], "out_features": 1})
    return TorchRegressor(
        model=spec,
        inputCols=columns,
        numWorkers=harness.NUM_WORKERS,
        batchSize=256,
        storageUri=folder,
        showProgress=False,
    )


def cases(name: str, frame: DataFrame, columns: list[str], folder: str) -> dict[str, Callable[[], float]]:
    """Returns the measured cases of one table."""
    fitted: list[TorchModel] = []

    def fit() -> None:
        fitted[:] = [estimator(columns, folder).fit(frame)]

    def transform() -> None:
        fitted[0].transform(frame).select("prediction").collect()

    def plain() -> None:
        frame.mapInArrow(count_rows, "rows long").collect()

    return {
        f"{name}, {step.__name__}": lambda step=step: harness.seconds_of(step)  # type: ignore[misc]
        for step in (fit, transform, plain)
    }
