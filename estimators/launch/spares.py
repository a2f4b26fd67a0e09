"""Holds free slots next to a running gang, so that the next launch can have more workers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark import InheritableThread

from ringspark.estimators import run_layout
from ringspark.estimators.launch.devices import Claim
from ringspark.estimators.launch.gang import GangStage
from ringspark.estimators.launch.heartbeat import Pulse
from ringspark.estimators.launch.roster import Offer, RosterBuilder, await_roster
from ringspark.estimators.launch.spark_job import SparkJob
from ringspark.pipelines import storage
from ringspark.pipelines.job_names import name_jobs
from ringspark.pipelines.spark_paths import is_remote

# Time for the tasks to see that they are to end, before their job is cancelled.
_END_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class SpareTask:
    """The function of a stage whose tasks hold slots for the workers of the next launch."""

    pulse: Pulse

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        # Spark reuses this process for a worker, which then starts at once.
        import ringspark.estimators.launch.train_task  # noqa: F401

        context = TaskContext.get()
        assert context is not None
        offer = Offer(task=context.partitionId(), attempt=context.attemptNumber(), claim=Claim(host=""))
        with storage.only_where(self.pulse.run_uri, run_layout.OWNER):
            await_roster(self.pulse, offer, "spare")
        yield from ()


class Spares:
    """A context manager that holds slots next to a running gang; the first `count` starts its tasks."""

    def __init__(self, stage: GangStage, pulse: Pulse, num_tasks: int) -> None:
        self._stage, self._job = stage, SparkJob(stage.spark)
        self._builder = RosterBuilder(pulse=pulse, num_tasks=num_tasks, name="spare")
        thread_class = threading.Thread if is_remote(stage.spark) else InheritableThread
        self._thread = thread_class(target=self._run, name="ringspark-spares", daemon=True)
        self._is_started = False

    @property
    def num_tasks(self) -> int:
        return self._builder.num_tasks

    def count(self) -> int:
        """Returns how many slots are held for more workers."""
        if not self._builder.num_tasks:
            return 0
        if not self._is_started:
            self._is_started = True
            self._thread.start()
        self._builder.look()
        return len(self._builder.offers)

    def __enter__(self) -> Spares:
        return self

    def __exit__(self, *_: Any) -> None:
        if not self._is_started:
            return
        # The store may not answer; the tasks end with the next launch too.
        with suppress(Exception):
            self._builder.dismiss()
        self._thread.join(_END_SECONDS)
        while self._thread.is_alive():
            self._job.cancel()
            self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        # Without spares, the training only stays smaller.
        with suppress(Exception):
            task = SpareTask(pulse=self._builder.pulse)
            with name_jobs(self._stage.spark, f"hold {self._builder.num_tasks} slots for more workers"):
                self._stage.run(task, self._builder.num_tasks, self._job, is_barrier=False)
