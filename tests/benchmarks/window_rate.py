"""`SequenceWindows` over one long series: rows/s and memory, against other ways to write windows in Spark.

There is one key, so one task, with four numbers per row. The other ways are minimal, without gaps, nulls or
equal times. "A frame's list" is the `collect_list` over a frame of rows that `SequenceWindows` uses. The
Arrow one slices NumPy arrays in Python after Spark's sort, and returns only the windows. Spark's heap is 1
GiB; "MiB" is the peak memory of its process so far.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import harness
import numpy as np
import psutil
import pyarrow as pa

from ringspark.estimators import SequenceWindows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

VALUES = ["a", "b", "c", "d"]


def series(spark: SparkSession, rows: int, folder: str) -> DataFrame:
    """Returns `rows` rows of one key, from Parquet."""
    from pyspark.sql import functions as F

    numbers = [F.rand(seed).alias(name) for seed, name in enumerate(VALUES)]
    spark.range(rows).select(F.lit("one").alias("k"), F.col("id").alias("t"), *numbers).write.parquet(folder)
    return spark.read.parquet(folder)


def stage(frame: DataFrame, steps: int) -> DataFrame:
    windows = SequenceWindows(
        keyCols="k",
        timeCol="t",
        valueCols=VALUES,
        steps=steps,
        targetCol="a",
        maxGap=1,
        targetTimeCol="until",
    )
    return windows.transform(frame)


def frame_list(frame: DataFrame, steps: int) -> DataFrame:
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    last = Window.partitionBy("k").orderBy("t").rowsBetween(1 - steps, 0)
    return frame.withColumn("features", F.collect_list(F.array(*VALUES)).over(last))


def lags(frame: DataFrame, steps: int, *, by_column: bool) -> DataFrame:
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    order = Window.partitionBy("k").orderBy("t")
    rows = frame.withColumn("row", F.array(*VALUES))
    if by_column:
        parts = [F.array(*(F.lag(name, i).over(order) for name in VALUES)) for i in range(steps - 1, -1, -1)]
    else:
        parts = [F.lag("row", i).over(order) for i in range(steps - 1, -1, -1)]
    return rows.select("k", "t", *VALUES, F.array(*parts).alias("features"))


def by_arrow(frame: DataFrame, steps: int) -> DataFrame:
    def cut(batches: Iterator[Any]) -> Iterator[Any]:
        before = np.empty((0, len(VALUES)))
        for batch in batches:
            rows = np.concatenate(
                [before, np.column_stack([batch.column(name).to_numpy() for name in VALUES])]
            )
            before = rows[1 - steps :]
            if (count := len(rows) - steps + 1) < 1:
                continue
            windows = np.lib.stride_tricks.sliding_window_view(rows, steps, axis=0).transpose(0, 2, 1)
            numbers = pa.array(windows.reshape(-1))
            offsets = np.arange(0, len(numbers) + 1, len(VALUES), dtype=np.int32)
            inner = pa.ListArray.from_arrays(offsets, numbers)
            lists = pa.ListArray.from_arrays(np.arange(0, count * steps + 1, steps, dtype=np.int32), inner)
            yield pa.RecordBatch.from_arrays([lists], ["features"])

    sorted_rows = frame.repartition("k").sortWithinPartitions("k", "t")
    return sorted_rows.mapInArrow(cut, "features array<array<double>>")


@contextmanager
def small_session() -> Iterator[SparkSession]:
    """Returns a session whose JVM has a heap of 1 GiB."""
    from pyspark.sql import SparkSession

    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = {
        "spark.driver.memory": "1g",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    session = SparkSession.builder.master(harness.MASTER).config(map=settings).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    try:
        yield session
    finally:
        session.stop()


def peak_mib(work: Callable[[], object]) -> int:
    """Returns the peak memory of Spark's process during `work`, in MiB."""
    java = [child for child in psutil.Process().children(recursive=True) if "java" in child.name()]
    peak, is_over = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_over.wait(0.05):
            peak = max(peak, *(child.memory_info().rss for child in java))

    watcher = threading.Thread(target=watch)
    watcher.start()
    work()
    is_over.set()
    watcher.join()
    return peak >> 20


def main() -> None:
    """Writes the windows of each method to a noop sink in interleaved rounds. Prints rows/s and memory."""
    options = harness.parse(__doc__, rows=(1_000_000, 2_000), steps=(48, 4))
    memory: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder, small_session() as spark:
        frame = series(spark, options.rows, f"{folder}/rows")

        def rate(name: str, make: Callable[[DataFrame, int], DataFrame]) -> float:
            windows = make(frame, options.steps).write.format("noop").mode("overwrite")
            seconds = harness.seconds_of(lambda: memory.update({name: peak_mib(windows.save)}))
            return options.rows / seconds

        cases = {
            "SequenceWindows": stage,
            "bare, a frame's list": frame_list,
            "bare, lags of an array": partial(lags, by_column=False),
            "bare, lags of each column": partial(lags, by_column=True),
            "bare, mapInArrow and NumPy": by_arrow,
        }
        turns = {name: partial(rate, name, make) for name, make in cases.items()}
        rates = harness.measure_in_turns(turns, options.repeats)
    harness.print_table(
        f"{options.rows:,} rows of one key, windows of {options.steps} x {len(VALUES)}, rows/s",
        ["", "median", "lowest", "highest", "ratio", "MiB"],
        [[*line, f"{memory[line[0]]:,}"] for line in harness.rate_rows(rates, "SequenceWindows")],
    )


if __name__ == "__main__":
    main()
