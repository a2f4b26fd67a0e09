"""Seconds that a gang of 2 costs before and after its work: Spark's part, and each collective's.

The work is one all-reduce of one number. "cold" is the first gang of a session, whose Python workers
have yet to start and import torch; warm ones reuse them. Spark's own barrier stage, with the one
exchange that a gang over several hosts makes, stands beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import harness
import torch
from supervised_gang import run_gang

from ringspark.estimators.collectives import Collective
from ringspark.estimators.training.phase import Status
from ringspark.jobs import cli

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COLLECTIVES = ("horovod", "torch")
SPARK_STAGE = "spark's barrier stage alone"


def touch(collective: Collective, device: str, status: Status) -> str:
    """The work: proof that the ranks are connected. Runs on every rank."""
    return str(collective.all_reduce(torch.ones(1)).item())


def exchange(batches: Iterable[Any]) -> Iterator[Any]:
    """One `allGather` and no collective. Runs in a barrier task."""
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    yield from batches
    context.allGather("")


def gang(spark: SparkSession, collective: str) -> None:
    """Starts and ends one gang."""
    texts = run_gang(spark, harness.NUM_WORKERS, collective, touch)
    assert texts == [str(float(harness.NUM_WORKERS))] * harness.NUM_WORKERS


def barrier_stage(spark: SparkSession) -> None:
    """Runs the stage that a gang lives in, without one."""
    frame = spark.range(0, harness.NUM_WORKERS, 1, harness.NUM_WORKERS)
    frame.mapInArrow(exchange, "id long", barrier=True).collect()


def main() -> None:
    """A fresh session for each cold start, then the warm ones in turns."""
    options = harness.parse(__doc__)
    # Spark's own stage comes first: its cold start is also the JVM's, which the gangs do not pay again.
    runs: dict[str, Callable[[SparkSession], None]] = {
        SPARK_STAGE: barrier_stage,
        **{name: partial(gang, collective=name) for name in COLLECTIVES},
    }
    cold = {}
    for name, run in runs.items():
        with cli.spark("ringspark bench gang", harness.MASTER) as spark:
            cold[name] = harness.seconds_of(partial(run, spark))
    with cli.spark("ringspark bench gang", harness.MASTER) as spark:
        cases = {name: partial(harness.seconds_of, partial(run, spark)) for name, run in runs.items()}
        warm = harness.measure_in_turns(cases, options.repeats)
    harness.print_table(
        f"gang_startup: seconds, gang of {harness.NUM_WORKERS} on {harness.MASTER}, "
        f"{options.repeats} warm runs",
        ["", "cold", "warm median", "min", "max", "ratio to spark's"],
        [
            [
                name,
                f"{cold[name]:.2f}",
                *(f"{value:.2f}" for value in (median(seconds), min(seconds), max(seconds))),
                f"{harness.median_ratio(seconds, warm[SPARK_STAGE]):.2f}",
            ]
            for name, seconds in warm.items()
        ],
    )


if __name__ == "__main__":
    main()
