"""One Spark job that another thread can cancel, on Spark Classic and Spark Connect."""

from __future__ import annotations

import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

from pyspark import InheritableThread
from pyspark.sql import SparkSession

from ringspark.pipelines.job_names import name_jobs
from ringspark.pipelines.spark_errors import LOST_WORKER
from ringspark.pipelines.spark_paths import is_remote

# Spark's messages for a job that was cancelled: by group, by tag, with all jobs, or with the session.
_CANCELLED = re.compile(
    r"(?:Job|Stage|Query) \S+ (?:was )?cancel+ed|JOB_CANCEL+ED|OPERATION_CANCEL+ED|OPERATION_ABANDONED"
    r"|SparkContext was shut down",
    re.IGNORECASE,
)
# Spark's messages for a job that it gave up because processes died, not because Python code raised.
_LOST = re.compile(
    r"aborted due to stage failure|Job aborted|ExecutorLost|exited unexpectedly|Could not recover"
)
_KILL_SECONDS = 5.0
_logger = logging.getLogger(__name__)
_RAISED = re.compile(r"Traceback \(most recent call last\)|PythonException|PicklingError")
# The most specific patterns come first.
_REASONS = (LOST_WORKER, re.compile(r"(?:Most recent failure|Lost task)[^\n]*"))


class SparkJob:
    """One job with a unique tag. Any thread may call `cancel`, even after the job has ended."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark: Any = spark
        self.tag = f"ringspark-gang-{uuid.uuid4().hex[:12]}"

    def run(self, action: Callable[[], list[Any]]) -> list[Any]:
        """Runs the action; cancels the job if the action raises, for example by Ctrl-C."""
        remote = is_remote(self._spark)
        owner = self._spark if remote else self._spark.sparkContext
        add, remove = (owner.addTag, owner.removeTag) if remote else (owner.addJobTag, owner.removeJobTag)
        add(self.tag)
        try:
            if remote or threading.current_thread() is not threading.main_thread():
                return action()
            return self._run_in_thread(action)
        except BaseException:
            self.cancel()
            raise
        finally:
            # The session may be gone.
            with suppress(Exception):
                remove(self.tag)

    def _run_in_thread(self, action: Callable[[], list[Any]]) -> list[Any]:
        """Runs the action in another thread, with the job group and tags of this thread.

        PySpark's handler of Ctrl-C cancels jobs over the main thread's connection, and fails while it waits
        for a job.
        """
        rows: Future[list[Any]] = Future()

        def act() -> None:
            try:
                rows.set_result(action())
            except BaseException as error:
                rows.set_exception(error)

        thread = InheritableThread(target=act, name="ringspark-gang", daemon=True)
        thread.start()
        try:
            thread.join()
        except BaseException:
            self.cancel()
            thread.join(_KILL_SECONDS)
            raise
        return rows.result()

    def wait_until_ended(self, seconds: float) -> None:
        """Waits until the tasks of the failed job have ended too, but at most `seconds`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._has_tasks(deadline - seconds):
            time.sleep(0.1)

    def _has_tasks(self, began: float) -> bool:
        if is_remote(self._spark):
            # A client cannot know; it waits as long as an executor takes to kill a Python worker.
            return time.monotonic() - began < _KILL_SECONDS
        try:
            tracker = self._spark.sparkContext.statusTracker()
            jobs = self._spark.sparkContext._jsc.sc().statusTracker().getJobIdsForTag(self.tag)
            infos = [tracker.getJobInfo(int(job)) for job in jobs]
            stages = [tracker.getStageInfo(id) for info in infos if info for id in info.stageIds]
        except Exception:
            return False  # the session is gone, and its executors with it
        return any(stage is not None and stage.numActiveTasks > 0 for stage in stages)

    def cancel(self) -> None:
        try:
            if is_remote(self._spark):
                self._spark.interruptTag(self.tag)
            else:
                self._spark.sparkContext.cancelJobsWithTag(self.tag)
        except Exception as error:
            _logger.warning("the job %s could not be cancelled: %s", self.tag, error)


@contextmanager
def cancellable(spark: SparkSession) -> Iterator[threading.Event]:
    """Yields an event that is set when somebody cancels the jobs of this thread, or all jobs.

    Spark reports this only to a running job, so a job sleeps in one slot of the cluster.
    """
    owner: Any = spark
    job, event = SparkJob(spark), threading.Event()
    sleeps = spark.range(0, 1, 1, 1).selectExpr("java_method('java.lang.Thread', 'sleep', 86400000L)")

    def run() -> None:
        if not is_remote(spark):
            owner.sparkContext.setInterruptOnCancel(True)  # ends the sleep at once
        try:
            with name_jobs(spark, "wait for executors"):
                job.run(sleeps.collect)
        except Exception as error:
            if was_cancelled(error):
                event.set()

    # Inherits the job group, which a notebook uses to cancel.
    thread_class = threading.Thread if is_remote(spark) else InheritableThread
    thread = thread_class(target=run, name="ringspark-cancellable", daemon=True)
    thread.start()
    try:
        yield event
    finally:
        # Repeated, because a cancel does not reach a job that is not submitted yet.
        while thread.is_alive():
            job.cancel()
            thread.join(0.2)


def was_cancelled(error: BaseException) -> bool:
    return _CANCELLED.search(str(error)) is not None


def find_lost_workers(error: BaseException) -> str | None:
    """Returns Spark's line about the processes that it lost; None for any other error."""
    text = str(error)
    if was_cancelled(error) or _RAISED.search(text) or not _LOST.search(text):
        return None
    found = [match[0] for match in (reason.search(text) for reason in _REASONS) if match]
    line = found[0] if found else next(line for line in text.splitlines() if _LOST.search(line))
    return " ".join(line.split())[:300]
