"""DataFrames whose rows Spark computes differently in each job, with a distinct `id` per row."""

import os
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

ROWS = 400


def random_function(spark: Any) -> Any:
    """`x` comes from a function of the user that draws new numbers in each job."""

    def draw(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            ids = batch.column(0)
            drawn = [int.from_bytes(os.urandom(4), "big") / 2**32 for _ in range(len(ids))]
            yield pa.RecordBatch.from_pydict({"id": ids, "x": drawn})

    return spark.range(0, ROWS, 1, 4).mapInArrow(draw, "id bigint, x double")


def shuffled_doubles(spark: Any) -> Any:
    """`x` is a sum of doubles; over several executors, a shuffle delivers them in another order each time."""
    parts = spark.range(0, ROWS * 50, 1, 8).selectExpr(f"id % {ROWS} AS id", "sin(id) * pow(10, id % 9) AS y")
    return parts.repartition(7, "y").groupBy("id").agg({"y": "sum"}).toDF("id", "x")


CHANGING = {"random function": random_function, "shuffled doubles": shuffled_doubles}
