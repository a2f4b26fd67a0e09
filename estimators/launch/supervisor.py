"""Keeps a gang training until it has finished, by restarting it if it was lost or hung.

It restarts a gang from its newest checkpoint, up to `max_restarts` times, if a process, a collective or a
store failed, but not after an error of user code or data.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Generic, Protocol, TypeVar

from pyspark.sql import SparkSession

from ringspark.estimators.failures import Failure, TrainingCancelledError, WorkerError
from ringspark.estimators.launch import slots
from ringspark.estimators.launch.gang import GangStage
from ringspark.estimators.launch.gang_task import GangTask, Work
from ringspark.estimators.launch.heartbeat import Beat, Pulse
from ringspark.estimators.launch.monitor import NO_ROOM, Monitor
from ringspark.estimators.launch.owner import write_owner
from ringspark.estimators.launch.rank_output import wait_for_output, with_last_lines
from ringspark.estimators.launch.spark_job import SparkJob, cancellable, find_lost_workers, was_cancelled
from ringspark.estimators.stages.session import spark_conf
from ringspark.pipelines.job_names import name_jobs

# Wait after a cancelled job: longer than Spark takes to kill a Python worker that does not react.
END_SECONDS = 15.0

# Finds the task that Spark blames in its report of a failed job.
_TASK = re.compile(r"(?:ResultTask\(\d+, |Task )(\d+)")

_logger = logging.getLogger(__name__)


class GangSettings(Protocol):
    """Config values that the supervisor reads."""

    @property
    def run_uri(self) -> str: ...
    @property
    def num_workers(self) -> int: ...
    @property
    def min_workers(self) -> int | None: ...
    @property
    def workers_per_replica(self) -> int: ...
    @property
    def use_gpu(self) -> bool: ...
    @property
    def collective(self) -> str: ...
    @property
    def max_restarts(self) -> int: ...
    @property
    def timeout_seconds(self) -> float: ...

    def with_workers(self: C, num_workers: int) -> C: ...


C = TypeVar("C", bound=GangSettings)


@dataclass(kw_only=True)
class Supervisor(Generic[C]):
    """Runs one gang.

    `restarts` has the reason of each restart. After a loss, `config` has the number of remaining workers.
    """

    spark: SparkSession
    config: C
    make_work: Callable[[C], Work]
    token: str
    check_data: Callable[[], None] | None = None
    restarts: list[str] = field(default_factory=list)
    _stage: Any = None
    _pulse: Pulse = field(init=False)

    def run(self) -> list[str]:
        """Blocks until the gang has finished or has failed for good; returns one text per rank, in order."""
        self._stage = GangStage(self.spark, self.config.use_gpu)
        with self._stage.turn(self.config.num_workers):
            while True:
                try:
                    return self._launch(len(self.restarts))
                except WorkerError as error:
                    if not error.may_pass or len(self.restarts) >= self.config.max_restarts:
                        raise self._final_error(error) from None
                    self.restarts.append(error.first.sentence)
                    _logger.warning(
                        "restarting the workers (restart %d of %d): %s",
                        len(self.restarts),
                        self.config.max_restarts,
                        error.first.sentence,
                    )
                    wait_for_output(error.first, self._pulse)
                    self._make_room(error.first)
                    if self.check_data is not None:
                        # If the store does not answer now, the workers will wait for it.
                        with suppress(OSError):
                            self.check_data()

    def _launch(self, launch: int) -> list[str]:
        config = self.config
        try:
            write_owner(config.run_uri, self.token, launch)
        except OSError as error:
            raise OSError(
                f"the run's folder {config.run_uri!r} cannot be written ({error}); free some space there, "
                "or grant write access, and fit again"
            ) from error
        self._pulse = pulse = Pulse(
            run_uri=config.run_uri, token=self.token, launch=launch, timeout_seconds=config.timeout_seconds
        )
        task = GangTask(
            collective=config.collective,
            work=self.make_work(config),
            use_gpu=config.use_gpu,
            pulse=pulse,
            driver=spark_conf(self.spark).get("spark.driver.host", ""),
        )
        job = SparkJob(self.spark)
        monitor = Monitor(pulse, config.num_workers, job, self._stage.slots)
        try:
            with monitor, name_jobs(self.spark, self._describe()):
                rows = self._stage.run(task, config.num_workers, job)
        except Exception as error:
            cause = self._find_cause(error, monitor)
            if isinstance(cause, (WorkerError, TrainingCancelledError)):
                job.wait_until_ended(END_SECONDS)
            raise cause from None
        except BaseException:
            # After Ctrl-C the folder may be removed next, and then no rank may write into it.
            job.wait_until_ended(END_SECONDS)
            raise
        failures = [Failure.from_json(row.failure) for row in rows if row.failure is not None]
        if failures:
            raise WorkerError(failures)
        return [str(row.result) for row in rows]

    def _describe(self) -> str:
        restarted = f", restart {len(self.restarts)}" if self.restarts else ""
        return (
            f"train {PurePosixPath(self.config.run_uri).name}, {self.config.num_workers} workers{restarted}"
        )

    def _find_cause(self, error: Exception, monitor: Monitor) -> Exception:
        if monitor.verdict is not None:
            return WorkerError([monitor.verdict, *_reported_failures(monitor.beats)])
        if was_cancelled(error):
            lines = str(error).splitlines()
            found = [line for line in lines if "ancel" in line] or lines or [""]
            return TrainingCancelledError(f"the training was cancelled in Spark ({found[0].strip()[:200]})")
        reason = find_lost_workers(error)
        if reason is None:
            return error
        # All ranks that never reported their end, or only the rank that Spark blames.
        task = _TASK.search(str(error))
        silent = [beat for beat in monitor.beats if not beat.ended]
        blamed = [beat for beat in silent if task and beat.task == int(task[1])] or silent
        message = f"its process died ({reason})"
        lost = [Failure.lost(beat.rank, beat.host, beat.phase, message) for beat in blamed]
        lost = lost or [Failure.lost(0, "unknown", "starting", f"Spark lost a worker ({reason})")]
        return WorkerError([*lost, *_reported_failures(monitor.beats)])

    def _final_error(self, error: WorkerError) -> WorkerError:
        failures = [with_last_lines(f, self._pulse) if f is error.first else f for f in error.failures]
        if not error.may_pass or not self.restarts:
            return WorkerError(failures)
        times = "once" if len(self.restarts) == 1 else f"{len(self.restarts)} times"
        return WorkerError(failures, f"; the workers had already been restarted {times} (maxRestarts)")

    def _make_room(self, cause: Failure) -> None:
        """Waits until the workers fit again; if they do not, continues with fewer replicas."""
        wanted, replica = self.config.num_workers, self.config.workers_per_replica
        least = self.config.min_workers or wanted
        begun = time.monotonic()
        with ExitStack() as stack:
            cancelled = None
            while (room := self._stage.slots()) is not None and room < wanted:
                # New executors take minutes on YARN and Kubernetes.
                patience = self.config.timeout_seconds
                if room - room % replica >= least:
                    # A gang that gave up for lack of room has already waited that long.
                    patience = 0.0 if cause.type == NO_ROOM else slots.REGISTRATION_SECONDS
                if time.monotonic() - begun >= patience:
                    break
                if cancelled is None:
                    _logger.warning("found %d of %d task slots; waiting for executors", room, wanted)
                    cancelled = stack.enter_context(cancellable(self.spark))
                if cancelled.wait(0.25):
                    raise TrainingCancelledError("the training was cancelled while it waited for executors")
        if room is None or room >= wanted:
            return
        fitting = room - room % replica
        if fitting < least:
            lower = f" or set minWorkers={fitting}" if fitting else f"; one replica needs {replica} workers"
            raise RuntimeError(
                f"{cause.sentence}; the cluster now has {room} task slots left for the {wanted} "
                f"workers of the training; add executors{lower if replica > 1 or fitting else ''}"
            ) from None
        _logger.warning("the training continues with %d workers instead of %d", fitting, wanted)
        self.config = self.config.with_workers(fitting)


def _reported_failures(beats: list[Beat]) -> list[Failure]:
    # From the beats, because the ranks' rows were lost with the job.
    return [Failure.from_json(beat.failure) for beat in beats if beat.failure is not None]
