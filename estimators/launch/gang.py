"""A gang: one Spark stage whose tasks become the ranks of a collective."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition, Lock
from typing import Any

from pyspark.sql import SparkSession

from ringspark.estimators.launch.gang_task import SCHEMA
from ringspark.estimators.launch.resources import most_slots, plan_stage, profile_of
from ringspark.estimators.launch.slots import count_slots, is_dynamic
from ringspark.estimators.launch.spark_job import SparkJob
from ringspark.estimators.stages.session import application_of, spark_conf
from ringspark.pipelines.spark_errors import explain_worker_errors


class GangQueue:
    """First-come, first-served queue of the gangs that this process runs in one application. Thread-safe.

    Without it, narrow gangs could overtake a wide gang forever. And if Spark manages no GPUs, two gangs at
    the same time would both take the first device of a host.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._waiting: deque[object] = deque()
        self._running: dict[object, int] = {}

    @property
    def num_waiting(self) -> int:
        with self._changed:
            return len(self._waiting)

    @contextmanager
    def turn(self, num_workers: int, count_slots: Callable[[], int | None]) -> Iterator[None]:
        """Waits until other gangs leave `num_workers` slots free; holds them inside the block.

        `count_slots` is called only if there is another gang; if it returns None, the gang does not wait.
        """
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            alone = len(self._waiting) == 1 and not self._running
        try:
            slots = None if alone else count_slots()
            with self._changed:
                # An interrupt (Ctrl-C) also ends the wait.
                self._changed.wait_for(lambda: self._may_run(ticket, num_workers, slots))
                self._running[ticket] = num_workers
                self._leave_line(ticket)
            yield
        finally:
            with self._changed:
                self._running.pop(ticket, None)
                self._leave_line(ticket)

    def _may_run(self, ticket: object, num_workers: int, slots: int | None) -> bool:
        if self._waiting[0] is not ticket:
            return False
        # A gang that is alone always starts, even if the cluster has shrunk since its slots were counted.
        return slots is None or not self._running or sum(self._running.values()) + num_workers <= slots

    def _leave_line(self, ticket: object) -> None:
        if ticket in self._waiting:
            self._waiting.remove(ticket)
        self._changed.notify_all()


# Application -> queue: the sessions of an application share its executors.
_QUEUES: dict[str, GangQueue] = {}
_LOCK = Lock()


class GangStage:
    def __init__(self, spark: SparkSession, use_gpu: bool) -> None:
        self.spark = spark
        self._use_gpu = use_gpu
        self._plan = plan_stage(spark_conf(spark) if use_gpu else {}, str(spark.version), use_gpu)
        if self._plan.problem:
            warnings.warn(self._plan.problem, RuntimeWarning, stacklevel=3)

    @property
    def can_grow(self) -> bool:
        """Whether a free slot has room for a worker: without Spark's help, nobody knows the free GPUs."""
        return not self._use_gpu or self._plan.gives_gpus

    def turn(self, num_workers: int) -> Any:
        """Returns a context manager that waits until the gangs of other threads leave room."""
        with _LOCK:
            queue = _QUEUES.setdefault(application_of(self.spark), GangQueue())
        # Without GPU resources, only the local rank chooses the GPU, so gangs must not run together.
        is_exclusive = self._use_gpu and not self._plan.gives_gpus
        return queue.turn(num_workers, (lambda: 0) if is_exclusive else self._most_slots)

    def _most_slots(self) -> int | None:
        conf = spark_conf(self.spark)
        return most_slots(conf, self._plan.task_cpus) if is_dynamic(conf) else self.slots()

    def slots(self) -> int | None:
        return count_slots(self.spark, self._use_gpu)

    def run(
        self, task: Callable[..., Any], num_tasks: int, job: SparkJob, *, is_barrier: bool = True
    ) -> list[Any]:
        """Runs one stage; returns its rows in rank order.

        `is_barrier`: whether Spark starts all tasks at once, or each one as soon as it has a slot.
        """
        # Passed only if needed: before Spark 4.0, stages of a DataFrame accept no profile.
        cpus = self._plan.task_cpus
        profile = {"profile": profile_of(self.spark, cpus)} if cpus else {}
        frame = self.spark.range(0, num_tasks, 1, num_tasks)
        with explain_worker_errors(also_losses=False):
            made = frame.mapInArrow(task, SCHEMA, barrier=is_barrier, **profile)
            rows = job.run(made.collect)
        return sorted(rows, key=lambda row: int(row.rank))
