"""Warm start: seconds of a whole small `fit` of 1,000 rows, one epoch, two workers, after an earlier fit.

The time consists of launch overhead: settings, one write of the shards, one barrier stage, one checkpoint.
For comparison there is Spark's share: a plain barrier stage of two tasks that wait for each other once, which
a gang does not need, and one plain job. To run it without the Python daemon of a local fit:

    conf="--conf spark.python.daemon.module=pyspark.daemon"
    PYSPARK_SUBMIT_ARGS="$conf pyspark-shell" python tests/benchmarks/warm_fit.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from statistics import median
from typing import TYPE_CHECKING, Any

import harness

from ringspark.estimators import TorchRegressor
from ringspark.estimators.collectives import COLLECTIVES
from ringspark.jobs import cli

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def meet(batches: Iterable[Any]) -> Iterable[Any]:
    """Waits for the other task of the stage, and returns its rows."""
    from pyspark import BarrierTaskContext

    BarrierTaskContext.get().barrier()
    yield from batches


def fit(frame: DataFrame, collective: str, folder: str) -> None:
    """Fits once."""
    TorchRegressor(
        model=harness.MLP,
        numWorkers=harness.NUM_WORKERS,
        collective=collective,
        batchSize=256,
        storageUri=folder,
        showProgress=False,
    ).fit(frame)


def cases(spark: SparkSession, frame: DataFrame, folder: str) -> dict[str, Callable[[], float]]:
    """Returns the measured cases."""
    workers = harness.NUM_WORKERS
    bare = spark.range(0, workers, 1, workers).mapInArrow(meet, "id long", barrier=True)
    gangs = [name for name in COLLECTIVES if name != "local"]
    return {
        **{
            f"fit, {name}": lambda name=name: harness.seconds_of(lambda: fit(frame, name, folder))  # type: ignore[misc]
            for name in gangs
        },
        "Spark: bare barrier stage": lambda: harness.seconds_of(bare.collect),
        "Spark: count of the rows": lambda: harness.seconds_of(frame.count),
    }


def main() -> None:
    """Measures in interleaved rounds after a warm-up round."""
    options = harness.parse(__doc__, rows=(1_000, 200))
    with tempfile.TemporaryDirectory() as folder, cli.spark("ringspark warm fit", harness.MASTER) as spark:
        frame = harness.random_frame(spark, options.rows).cache()
        seconds = harness.measure_in_turns(cases(spark, frame, folder), options.repeats)
    harness.print_table(
        f"warm_fit: seconds, {options.rows:,} rows, one epoch, {harness.NUM_WORKERS} workers, "
        f"{harness.MASTER}, {options.repeats} rounds",
        ["", "median", "min", "max"],
        [
            [
                name,
                *(f"{value:.2f}" for value in (median(values), min(values), max(values))),
            ]
            for name, values in seconds.items()
        ],
    )


if __name__ == "__main__":
    main()
