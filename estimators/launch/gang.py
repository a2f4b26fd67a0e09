"""A gang: one Spark barrier stage whose tasks become the ranks of a collective.

The stage is a `mapInArrow(..., barrier=True)` of the DataFrame API, so Spark Connect runs it too.
Each task learns its rank from the hosts of all tasks, rank 0 opens the rendezvous, all ranks
connect, and the work runs (`gang_task`). Gangs of one driver that do not fit together take turns
(`gang_queue`). The `supervisor` starts a gang again.
"""

from __future__ import annotations

import warnings
from typing import Any

from pyspark.sql import SparkSession

from ringspark.estimators.launch.gang_queue import queue_of
from ringspark.estimators.launch.gang_task import SCHEMA, GangTask
from ringspark.estimators.launch.resources import StagePlan, profile_of, stage_plan
from ringspark.estimators.launch.slots import count_slots
from ringspark.estimators.launch.spark_job import SparkJob
from ringspark.estimators.stages.session import application_of
from ringspark.pipelines.spark_errors import explain_worker_errors


class GangStage:
    """Schedules the barrier stages of gangs, with or without GPUs, in one session."""

    def __init__(self, spark: SparkSession, use_gpu: bool) -> None:
        self._spark = spark
        self._use_gpu = use_gpu
        self._plan: StagePlan = stage_plan(spark, use_gpu)
        if self._plan.problem:
            warnings.warn(self._plan.problem, RuntimeWarning, stacklevel=3)

    def turn(self, num_workers: int) -> Any:
        """Returns a context manager that waits until the gangs of other threads leave room."""
        return queue_of(application_of(self._spark)).turn(num_workers, self._shared_slots)

    def slots(self) -> int | None:
        """Returns how many workers can run at the same time now; None if nobody knows."""
        return count_slots(self._spark, self._use_gpu)

    def run(self, task: GangTask, num_workers: int, job: SparkJob) -> list[Any]:
        """Runs one barrier stage; returns its rows in rank order. Blocks until all ranks have ended."""
        # Passed only if there is one: before Spark 4.0 the stages of a DataFrame accept no profile.
        cpus = self._plan.task_cpus
        profile = {"profile": profile_of(self._spark, cpus)} if cpus else {}
        frame = self._spark.range(0, num_workers, 1, num_workers)
        with explain_worker_errors():
            rows = job.run(lambda: frame.mapInArrow(task, SCHEMA, barrier=True, **profile).collect())
        return sorted(rows, key=lambda row: int(row.rank))

    def _shared_slots(self) -> int | None:
        """Returns how many slots gangs share; 0 if only the local rank tells the GPUs apart."""
        if self._use_gpu and not self._plan.gives_gpus:
            return 0
        return self.slots()
