"""Finds out whether a worker was lost because the cluster took its executor away."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from ringspark.estimators.launch.meeting import own_executor
from ringspark.pipelines import spark_plans
from ringspark.pipelines.spark_paths import is_remote

# Losses to the cluster that cost no restart after each new checkpoint; later losses count as failures.
FREE_LOSSES = 10
# Spark reports an executor's end a moment after its tasks have ended.
_WAIT_SECONDS = 6.0
# Tasks that look for executors, and the time that each takes, in seconds.
_PROBES, _PROBE_SECONDS = 4, 0.3
# Spark's reason for an executor without tasks, which dynamic allocation gives back.
_IDLE = "killed by driver"

_TAKEN = re.compile(
    r"decommission|preempt|unrelated to the running tasks|worker lost|lost worker|"
    r"heartbeat timed out|deleted by|released|disassociated|explicit termination|code (?:0|129|137|143)\b",
    re.IGNORECASE,
)
_OWN_FAULT = re.compile(r"memory|OOM", re.IGNORECASE)


def find_taken(spark: SparkSession, since: float, message: str, executors: Collection[str]) -> str | None:
    """Returns why the cluster took an executor at the time of a loss; None if it took none.

    Args:
        since: Earliest time of the loss, in seconds since the epoch.
        message: Spark's own text about the loss.
        executors: Executors of the lost tasks, if these were ordinary tasks. A client of Spark Connect, which
            cannot ask Spark for reasons, looks for them.
    """
    if is_taken(message):
        return message
    if is_remote(spark):
        # The executor of a process that died by itself lives on.
        is_gone = executors and not _find_executors(spark) & set(executors)
        return "its executor is gone" if is_gone else None
    deadline = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < deadline:
        # Spark's status store is no public interface; without it, each loss counts as a failure.
        with suppress(Exception):
            reasons = _reasons(spark, since)
            if reasons:
                return next((reason for reason in reasons if is_taken(reason)), None)
        time.sleep(0.2)
    return None


def is_taken(reason: str) -> bool:
    return _TAKEN.search(reason) is not None and _OWN_FAULT.search(reason) is None


def _reasons(spark: SparkSession, since: float) -> list[str]:
    """Returns why executors were removed since `since`, but not for idleness."""
    store: Any = spark.sparkContext._jsc.sc().statusStore()
    found = store.executorList(False)
    executors = [found.apply(index) for index in range(found.size())]
    gone = [each for each in executors if each.removeTime().isDefined()]
    reasons = [
        str(each.removeReason().getOrElse(None) or "its executor was removed")
        for each in gone
        if each.removeTime().get().getTime() / 1000 >= since
    ]
    return [reason for reason in reasons if _IDLE not in reason]


def _find_executors(spark: SparkSession) -> set[str]:
    """Returns the executors that run tasks now."""
    num_tasks = _PROBES * (spark_plans.default_parallelism(spark) or 8)
    rows = spark.range(0, num_tasks, 1, num_tasks).mapInArrow(_write_executor, "executor string").collect()
    return {str(row.executor) for row in rows}


def _write_executor(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _ in batches:
        time.sleep(_PROBE_SECONDS)  # so that each executor gets some of the tasks
        yield pa.RecordBatch.from_pylist([{"executor": own_executor()}])
