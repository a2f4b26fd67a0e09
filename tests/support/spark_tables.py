"""DataFrames and fits of several test files, and conditions of the Spark session."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

MASTER = os.environ.get("RINGSPARK_TEST_MASTER", "local[4]")
on_this_host = pytest.mark.skipif(not MASTER.startswith("local["), reason="needs workers on this host")


@contextmanager
def no_job(spark: Any) -> Iterator[None]:
    """Context that must run no Spark job."""
    tracker = spark.sparkContext.statusTracker()
    before = len(tracker.getJobIdsForGroup(None))
    yield
    assert len(tracker.getJobIdsForGroup(None)) == before


def points(spark: Any, rows: int, width: int = 3, partitions: int = 3) -> Any:
    """Returns `id`, `features` (an array of `width` normally distributed doubles) and `label`, their sum."""
    x = np.random.default_rng(3).normal(size=(rows, width))
    values = [(i, row.tolist(), float(row.sum())) for i, row in enumerate(x)]
    schema = "id long, features array<double>, label double"
    table = spark.createDataFrame(values, schema).repartition(partitions).cache()
    table.count()  # the first job that fills the cache has another order of rows than later ones
    return table


def waves(spark: Any, rows: int = 96) -> Any:
    """Returns `features`, the sine and cosine of the row number, and `label`, in two partitions."""
    return spark.range(0, rows, 1, 2).selectExpr(
        "array(sin(id), cos(id)) as features", "sin(2 * id) as label"
    )


def quiet(kind: type[Any], folder: Path | str, **params: Any) -> Any:
    """Returns an estimator that shows no progress; its runs are in `folder`, unless `runUri` is set."""
    place = {} if "runUri" in params else {"storageUri": str(folder)}
    return kind(**place | {"showProgress": False} | params)


def values_of(frame: Any, *columns: str, order: str = "id") -> list[Any]:
    """Returns a column, or tuples of several columns, of all rows, ordered by the column `order`."""
    names = columns or ("prediction",)
    rows = frame.orderBy(order).select(*(f"`{name}`" for name in names)).collect()
    return [tuple(row) if len(names) > 1 else row[0] for row in rows]


def run_stream(scored: Any, folder: Path, name: str = "scored") -> Any:
    """Writes all rows of a streaming DataFrame that have arrived; returns the table of all rows so far."""
    writer = scored.writeStream.format("parquet").trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(folder / "progress")).start(str(folder / name))
    assert query.awaitTermination(300)
    assert query.exception() is None
    return scored.sparkSession.read.parquet(str(folder / name))


@contextmanager
def spark_conf(spark: Any, settings: dict[str, Any]) -> Iterator[None]:
    before = {name: spark.conf.get(name, None) for name in settings}
    try:
        for name, value in settings.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, value in before.items():
            if value is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, value)


def time_zone(spark: Any, zone: str) -> Any:
    return spark_conf(spark, {"spark.sql.session.timeZone": zone})
