"""Finds out whether a worker was lost because the cluster took its executor away."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from ringspark.estimators.failures import TrainingCancelledError
from ringspark.estimators.launch import slots
from ringspark.estimators.launch.gang import GangStage
from ringspark.estimators.launch.gang_task import ARROW_SCHEMA
from ringspark.estimators.launch.roster import own_executor
from ringspark.estimators.launch.spark_job import SparkJob, was_cancelled
from ringspark.estimators.stages.session import spark_conf
from ringspark.pipelines.job_names import name_jobs
from ringspark.pipelines.spark_paths import is_remote

# Losses to the cluster that cost no restart after each new checkpoint; later losses count as failures.
FREE_LOSSES = 10
# Spark reports an executor's end after its tasks have ended: a standalone cluster up to 5 s later
# (spark.standalone.executorRemoveDelayOnDisconnection), and a busy driver some seconds more.
_WAIT_SECONDS = 10.0
# Probe tasks per core, and seconds per task and for all tasks.
_PROBES, _PROBE_SECONDS, _PROBE_LIMIT_SECONDS = 4, 0.3, 60.0
# Spark's reason for an executor without tasks, which dynamic allocation gives back.
_IDLE = "killed by driver"

_TAKEN = re.compile(
    r"decommission|preempt|unrelated to the running tasks|worker lost|lost worker|"
    r"heartbeat timed out|deleted by|released|disassociated|explicit termination|code (?:0|129|137|143)\b",
    re.IGNORECASE,
)
_OWN_FAULT = re.compile(r"memory|OOM", re.IGNORECASE)


def find_taken(stage: GangStage, since: float, message: str, executors: Collection[str]) -> str | None:
    """Returns why the cluster took an executor at the time of a loss; None if it took none.

    Args:
        since: Earliest time of the loss, in seconds since the epoch.
        message: Spark's own text about the loss.
        executors: Executors of the lost tasks; empty in a barrier stage. Used on Spark Connect, which reports
            no reasons.

    Raises TrainingCancelledError if the user cancels the search for the executors.
    """
    spark = stage.spark
    if is_taken(message):
        return message
    if is_remote(spark):
        living = _find_executors(stage) if executors else None
        # If only the process died, its executor still runs tasks.
        return "its executor is gone" if living and not living & set(executors) else None
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


def _find_executors(stage: GangStage) -> set[str] | None:
    """Returns the executors that run tasks now; None if that cannot be known in `_PROBE_LIMIT_SECONDS`."""
    cores = slots.default_parallelism(stage.spark, spark_conf(stage.spark))
    if cores is None:
        return None
    job = SparkJob(stage.spark)
    timer = threading.Timer(_PROBE_LIMIT_SECONDS, job.cancel)
    timer.start()
    try:
        with name_jobs(stage.spark, "find lost executors"):
            rows = stage.run(_write_executor, _PROBES * cores, job, is_barrier=False)
    except Exception as error:
        if was_cancelled(error) and timer.is_alive():
            raise TrainingCancelledError("the training was cancelled while it looked for executors") from None
        return None
    finally:
        timer.cancel()
    return {str(row.result) for row in rows}


def _write_executor(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _ in batches:
        time.sleep(_PROBE_SECONDS)  # so that each executor gets some of the tasks
        row = {"rank": 0, "result": own_executor(), "failure": None}
        yield pa.RecordBatch.from_pylist([row], ARROW_SCHEMA)
