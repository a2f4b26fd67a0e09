"""One Spark job that can be cancelled from another thread, on Spark Classic and Spark Connect.

The job has a unique tag. When a task is cancelled, Spark does not interrupt its Python worker at once: the
executor kills it (SIGKILL, so a stopped process goes too) after at most `spark.python.task.killTimeout` and
the two seconds between Spark's checks.
"""

from __future__ import annotations

import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from pyspark import InheritableThread
from pyspark.sql import SparkSession

from ringspark.pipelines.spark_paths import is_remote

# Spark's words for a job that somebody cancelled: by group, by tag, with all jobs, or with the session.
_CANCELLED = re.compile(
    r"(?:Job|Stage|Query) \S+ (?:was )?cancel+ed|JOB_CANCEL+ED|OPERATION_CANCEL+ED|OPERATION_ABANDONED"
    r"|SparkContext was shut down",
    re.IGNORECASE,
)
# Spark's words for a job that it gave up because processes died; an error of a task's Python code has others.
_LOST = re.compile(
    r"aborted due to stage failure|Job aborted|ExecutorLost|exited unexpectedly|Could not recover"
)
_KILL_SECONDS = 5.0
_logger = logging.getLogger(__name__)
_RAISED = re.compile(r"Traceback \(most recent call last\)|PythonException|PicklingError")
# The most telling patterns come first.
_REASONS = (
    re.compile(r"ExecutorLostFailure[^\n]*"),
    re.compile(r"Python worker exited[^\n]*"),
    re.compile(r"(?:Most recent failure|Lost task)[^\n]*"),
)


class SparkJob:
    """One job, known by its tag. Any thread may call `cancel`, even after the job has ended."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark: Any = spark
        self.tag = f"ringspark-gang-{uuid.uuid4().hex[:12]}"

    def run(self, action: Callable[[], list[Any]]) -> list[Any]:
        """Runs the action; an exception that leaves it, such as Ctrl-C, cancels the job."""
        remote = is_remote(self._spark)
        owner = self._spark if remote else self._spark.sparkContext
        add, remove = (owner.addTag, owner.removeTag) if remote else (owner.addJobTag, owner.removeJobTag)
        add(self.tag)
        try:
            if remote or threading.current_thread() is not threading.main_thread():
                return action()
            return self._aside(action)
        except BaseException:
            self.cancel()
            raise
        finally:
            # The session may be gone.
            with suppress(Exception):
                remove(self.tag)

    def _aside(self, action: Callable[[], list[Any]]) -> list[Any]:
        """Runs the action in another thread, with this one's job group and tags.

        PySpark's handler of Ctrl-C cancels jobs over the connection of the main thread. If the main thread
        waits for a job over that connection, the handler fails and nobody is interrupted.
        """
        rows: list[Any] = []
        errors: list[BaseException] = []

        def act() -> None:
            try:
                rows.extend(action())
            except BaseException as error:
                errors.append(error)

        thread = InheritableThread(target=act, name="ringspark-gang", daemon=True)
        thread.start()
        try:
            thread.join()
        except BaseException:
            self.cancel()
            thread.join(_KILL_SECONDS)
            raise
        if errors:
            raise errors[0]
        return rows

    def wait_until_ended(self, seconds: float) -> None:
        """Waits, after the job has failed, until its tasks have ended too, but at most `seconds`."""
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
        """Ends the job if it is running; the log says so if Spark cannot be asked."""
        try:
            if is_remote(self._spark):
                self._spark.interruptTag(self.tag)
            else:
                self._spark.sparkContext.cancelJobsWithTag(self.tag)
        except Exception as error:
            _logger.warning("the job %s could not be cancelled: %s", self.tag, error)


@contextmanager
def cancellable(spark: SparkSession) -> Iterator[threading.Event]:
    """Yields an event that is set when somebody cancels the jobs of this thread, or of all.

    Spark tells only a running job of that. So one runs inside the block, whose task sleeps in one of the
    cluster's slots; other jobs, also those of other fits, have one less meanwhile.
    """
    owner: Any = spark
    job, event = SparkJob(spark), threading.Event()
    sleeps = spark.range(0, 1, 1, 1).selectExpr("java_method('java.lang.Thread', 'sleep', 86400000L)")

    def run() -> None:
        if not is_remote(spark):
            owner.sparkContext.setInterruptOnCancel(True)  # ends the sleep at once
        try:
            job.run(sleeps.collect)
        except Exception as error:
            if was_cancelled(error):
                event.set()

    # Inherits the job group, by which a notebook cancels.
    kind = threading.Thread if is_remote(spark) else InheritableThread
    thread = kind(target=run, name="ringspark-cancellable", daemon=True)
    thread.start()
    try:
        yield event
    finally:
        # Again and again, since a cancel does not reach a job that has yet to be submitted.
        while thread.is_alive():
            job.cancel()
            thread.join(0.2)


def was_cancelled(error: BaseException) -> bool:
    """Whether the error says that somebody cancelled the job."""
    return _CANCELLED.search(str(error)) is not None


def lost_workers(error: BaseException) -> str | None:
    """Returns, in one line, what Spark says about the processes that it lost; None for any other error."""
    text = str(error)
    if was_cancelled(error) or _RAISED.search(text) or not _LOST.search(text):
        return None
    found = [match[0] for match in (reason.search(text) for reason in _REASONS) if match]
    line = found[0] if found else next(line for line in text.splitlines() if _LOST.search(line))
    return " ".join(line.split())[:300]
