"""Startup and shutdown time of a gang of 2, by collective, and Spark's share.

The work is one all-reduce of one number. "cold" is the first gang of a session: its Python workers must start
and import torch. Warm gangs reuse the workers. The table also has a plain barrier stage of Spark with one
allGather, as in a gang on several hosts.
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
    """Proves that the ranks are connected. Runs on every rank."""
    return str(collective.all_reduce(torch.ones(1)).item())


def exchange(batches: Iterable[Any]) -> Iterator[Any]:
    """Calls `allGather` once, without a collective. Runs in a barrier task."""
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    yield from batches
    context.allGather("")


def gang(spark: SparkSession, collective: str) -> None:
    """Starts and ends one gang."""
    texts = run_gang(spark, harness.NUM_WORKERS, collective, touch)
    assert texts == [str(float(harness.NUM_WORKERS))] * harness.NUM_WORKERS


def barrier_stage(spark: SparkSession) -> None:
    """Runs a barrier stage without a gang."""
    frame = spark.range(0, harness.NUM_WORKERS, 1, harness.NUM_WORKERS)
    frame.mapInArrow(exchange, "id long", barrier=True).collect()


def main() -> None:
    """Starts a session for each cold start, then measures warm starts in interleaved rounds."""
    options = harness.parse(__doc__)
    # Spark's own stage is first, because its cold start includes the JVM's.
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
