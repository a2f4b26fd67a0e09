"""DataFrames of every kind, each with the columns `id` (bigint) and `x` (double), a function of `id`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

ROWS = 300

Frame = Callable[[Any, Path], Any]


def partner(number: Any) -> Any:
    """Returns the value of `x` that belongs to an id."""
    return number * 0.5 + 1.0


IDS = np.arange(ROWS)


def _pandas(spark: Any, _: Path) -> Any:
    return spark.createDataFrame(pd.DataFrame({"id": IDS, "x": partner(IDS)}))


def _range(spark: Any, _: Path, partitions: int = 4) -> Any:
    return _paired(spark.range(0, ROWS, 1, partitions))


def _view(spark: Any, path: Path) -> Any:
    _pandas(spark, path).createOrReplaceTempView("ringspark_view_of_pandas")
    return spark.sql("SELECT * FROM ringspark_view_of_pandas WHERE id >= 10")


def _file(format_name: str) -> Frame:
    def make(spark: Any, path: Path) -> Any:
        folder = str(path / format_name)
        _range(spark, path, 5).write.format(format_name).option("header", "true").save(folder)
        reader = spark.read.format(format_name).option("header", "true").schema("id bigint, x double")
        return reader.load(folder)

    return make


def _then(make: Frame, change: Callable[[Any], Any]) -> Frame:
    return lambda spark, path: change(make(spark, path))


def _paired(ids: Any) -> Any:
    return ids.selectExpr("id", "id * 0.5D + 1D AS x")


def _many(spark: Any, path: Path) -> Any:
    return _range(spark, path, 150)


LOCAL: dict[str, Frame] = {
    "pandas": _pandas,
    "Arrow": lambda spark, _: spark.createDataFrame(pa.table({"id": IDS, "x": partner(IDS)})),
    "NumPy": lambda spark, _: spark.createDataFrame(
        np.stack([IDS.astype(np.float64), partner(IDS)], axis=1), ["id", "x"]
    ).selectExpr("CAST(id AS bigint) AS id", "CAST(x AS double) AS x"),
    "lists": lambda spark, _: spark.createDataFrame([(i, partner(i)) for i in range(ROWS)], ["id", "x"]),
    "dicts": lambda spark, _: spark.createDataFrame([{"id": i, "x": partner(i)} for i in range(ROWS)]),
    "VALUES": lambda spark, _: spark.sql(
        f"SELECT * FROM VALUES {', '.join(f'({i}L, {partner(i)}D)' for i in range(ROWS))} AS t(id, x)"
    ),
    "SHOW": lambda spark, _: _paired(
        spark.sql("SHOW FUNCTIONS LIKE 'a*'").selectExpr("crc32(function) AS id")
    ),
    "view of pandas": _view,
    "JSON of lists": lambda spark, _: (
        spark.createDataFrame([(f'{{"id": {i}, "x": {partner(i)}}}',) for i in range(ROWS)], ["text"])
        .selectExpr("from_json(text, 'id bigint, x double') AS row")
        .select("row.id", "row.x")
    ),
    "pandas, fillna": _then(_pandas, lambda df: df.fillna(0.0)),
    "pandas, where": _then(_pandas, lambda df: df.where("id % 3 = 0")),
    "pandas, limit": _then(_pandas, lambda df: df.limit(90)),
    "pandas and nothing": _then(_pandas, lambda df: df.union(df.where("id < 0"))),
    "pandas, left join with nothing": _then(
        _pandas, lambda df: df.join(df.where("id < 0").selectExpr("id", "x AS y"), "id", "left").drop("y")
    ),
    "one row": lambda spark, _: spark.sql("SELECT 7L AS id, 4.5D AS x"),
    "few rows": _then(_pandas, lambda df: df.limit(3)),
}
"""Spark evaluates expressions over these on the driver, where there are no partitions."""

OTHERS: dict[str, Frame] = {
    "range": _range,
    "many partitions": _many,
    "many empty partitions": _then(_many, lambda df: df.where("id BETWEEN 20 AND 25")),
    "Parquet": _file("parquet"),
    "ORC": _file("orc"),
    "CSV": _file("csv"),
    "JSON": _file("json"),
    "cached": _then(_many, lambda df: df.repartition(100, "id").cache()),
    "cached pandas": _then(_pandas, lambda df: df.cache()),
    "local checkpoint": _then(_pandas, lambda df: df.localCheckpoint()),
    "limit": _then(_many, lambda df: df.limit(55)),
    "offset": _then(_range, lambda df: df.offset(20)),
    "sample": _then(_many, lambda df: df.sample(0.4, 3)),
    "sample with replacement": _then(_range, lambda df: df.sample(True, 1.5, 3)),
    "sorted": _then(_many, lambda df: df.orderBy("x", ascending=False)),
    "union": _then(_range, lambda df: df.union(df.selectExpr("id + 1000", "x + 500D"))),
    "union of pandas and range": lambda spark, path: _pandas(spark, path).union(_range(spark, path, 3)),
    "join": _then(_range, lambda df: df.select("id").join(df.hint("merge"), "id")),
    "broadcast join": lambda spark, path: _range(spark, path).select("id").join(_pandas(spark, path), "id"),
    "cross join": _then(
        _range,
        lambda df: _paired(df.selectExpr("id AS a").crossJoin(df.limit(3)).selectExpr("a * 3 + id AS id")),
    ),
    "explode": _then(_pandas, lambda df: _paired(df.selectExpr("explode(sequence(id, id + 2)) AS id"))),
    "repartitioned": _then(_pandas, lambda df: df.repartition(7)),
    "repartitioned by a column": _then(_range, lambda df: df.repartition(9, "id")),
    "by range": _then(_pandas, lambda df: df.repartitionByRange(5, "x")),
    "coalesced": _then(_many, lambda df: df.coalesce(3)),
    "coalesced pandas": _then(_pandas, lambda df: df.coalesce(1)),
    "skewed": _then(_range, lambda df: df.repartition(6, df.id > 5)),
    "empty partitions": _then(_pandas, lambda df: df.where("id < 5").repartition(20)),
    "distinct": _then(_range, lambda df: df.union(df).distinct()),
    "aggregate": _then(_pandas, lambda df: df.union(df).groupBy("id").agg({"x": "avg"}).toDF("id", "x")),
    "window": _then(
        _pandas,
        lambda df: _paired(
            df.selectExpr("row_number() OVER (PARTITION BY id % 5 ORDER BY x) AS id")
        ).selectExpr("CAST(id AS bigint) AS id", "x"),
    ),
    "Python function": _then(
        _pandas, lambda df: df.mapInArrow(lambda batches: batches, "id bigint, x double")
    ),
    "row ids": _then(_pandas, lambda df: _paired(df.selectExpr("monotonically_increasing_id() AS id"))),
}
"""Spark reads or computes the rows of these frames in tasks."""

FRAMES = LOCAL | OTHERS

CHANGING = ("sample", "limit", "offset")
"""Starts of the names of frames of which several executors give other rows in each job."""
