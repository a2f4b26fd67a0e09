"""Keeps a gang training until it has ended well, by restarting it when it was lost or hung.

The supervisor starts a gang again, up to `max_restarts` times, if its infrastructure failed: a process or an
executor died, a rank hung, a collective broke although no rank had raised an error, a store failed for a
while. An error of user code or data ends it at once, and so does a cancelled job. The driver has to restart
the gang, because Spark gives up a barrier stage with a result as soon as one of its tasks dies.

Every start resumes by itself from the newest good checkpoint of the run directory (`train_worker`).
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import SparkSession

from ringspark.estimators.failures import Failure, TrainingCancelledError, WorkerError
from ringspark.estimators.launch import slots
from ringspark.estimators.launch.gang import GangStage
from ringspark.estimators.launch.gang_task import GangTask, Work
from ringspark.estimators.launch.heartbeat import Beat, Pulse
from ringspark.estimators.launch.monitor import NO_ROOM, Monitor
from ringspark.estimators.launch.owner import write_owner
from ringspark.estimators.launch.rank_output import await_output, with_last_lines
from ringspark.estimators.launch.spark_job import SparkJob, cancellable, lost_workers, was_cancelled
from ringspark.estimators.stages.session import spark_conf
from ringspark.estimators.training.settings.config import TrainConfig

# Wait after a cancelled job: longer than Spark takes to kill a Python worker that does not react.
END_SECONDS = 15.0

# Finds the task that Spark blames in its report of a failed job.
_TASK = re.compile(r"(?:ResultTask\(\d+, |Task )(\d+)")

_logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Supervisor:
    """Runs one gang, and restarts it if necessary.

    Attributes:
        config: Config of the training; after a loss, with the number of ranks that go on.
        make_work: Makes the work of a rank from the config.
        token: Token of this driver, see `owner`.
        check_data: Function called before the workers start again; it raises an error if the data changed.
        restarts: Reasons of the restarts so far, one line for each.
    """

    spark: SparkSession
    config: TrainConfig
    make_work: Callable[[TrainConfig], Work]
    token: str
    check_data: Callable[[], None] | None = None
    restarts: list[str] = field(default_factory=list)
    _stage: Any = None
    _pulse: Pulse = field(init=False)

    def run(self) -> list[str]:
        """Blocks until the gang has ended well or has failed for good; returns one text per rank, in order.

        Raises:
            WorkerError: A rank failed through its own fault, or the last allowed start failed.
            TrainingCancelledError: The Spark job was cancelled.
            RuntimeError: The cluster no longer has room for the workers.
            ValueError: The data changed.
            OSError: The run's folder cannot be written to.
        """
        self._stage = GangStage(self.spark, self.config.use_gpu)
        with self._stage.turn(self.config.num_workers):
            while True:
                try:
                    return self._launch(len(self.restarts))
                except WorkerError as error:
                    if not error.may_pass or len(self.restarts) >= self.config.max_restarts:
                        raise self._final(error) from None
                    self._note(error.first.sentence)
                    await_output(error.first, self._pulse)
                    self._make_room(error.first)
                    if self.check_data is not None:
                        # If the store does not answer now, the workers will wait for it.
                        with suppress(OSError):
                            self.check_data()

    def _launch(self, launch: int) -> list[str]:
        """Runs the gang once, as one Spark job."""
        config = self.config
        try:
            write_owner(config.run_uri, self.token, launch)
        except OSError as error:
            raise OSError(
                f"the run's folder {config.run_uri!r} takes no files ({error}); make room there, or give "
                "access to it, and fit again"
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
            with monitor:
                rows = self._stage.run(task, config.num_workers, job)
        except Exception as error:
            cause = self._cause(error, monitor)
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

    def _cause(self, error: Exception, monitor: Monitor) -> Exception:
        """Returns the error to raise or to restart on, for a job that failed."""
        if monitor.verdict is not None:
            return WorkerError([monitor.verdict, *_told(monitor.beats)])
        if was_cancelled(error):
            return TrainingCancelledError(f"the training was cancelled in Spark ({_first_line(error)})")
        reason = lost_workers(error)
        if reason is None:
            return error
        blamed = _TASK.search(str(error))
        lost = _lost(
            monitor.beats, f"its process died ({reason})", task=int(blamed[1]) if blamed else None
        ) or [Failure.lost(0, "unknown", "starting", f"Spark lost a worker ({reason})")]
        return WorkerError([*lost, *_told(monitor.beats)])

    def _final(self, error: WorkerError) -> WorkerError:
        failures = [with_last_lines(f, self._pulse) if f is error.first else f for f in error.failures]
        if not error.may_pass or not self.restarts:
            return WorkerError(failures)
        times = "once" if len(self.restarts) == 1 else f"{len(self.restarts)} times"
        return WorkerError(failures, f"; the workers had been started again {times} (maxRestarts)")

    def _note(self, reason: str) -> None:
        self.restarts.append(reason)
        _logger.warning(
            "the workers are started again (%d of %d times): %s",
            len(self.restarts),
            self.config.max_restarts,
            reason,
        )

    def _make_room(self, cause: Failure) -> None:
        """Waits until the workers fit again; if they do not, lets fewer of them go on.

        New executors take minutes on YARN and Kubernetes, so a gang that cannot go on without them waits as
        long as a worker may wait for another. One that can go on with fewer waits as a first start does.

        Raises:
            RuntimeError: Not even `min_workers` fit.
            TrainingCancelledError: The Spark jobs of this thread were cancelled meanwhile.
        """
        wanted = self.config.num_workers
        least = self.config.min_workers or wanted
        begun = time.monotonic()
        with ExitStack() as stack:
            cancelled = None
            while (room := self._stage.slots()) is not None and room < wanted:
                patience = self.config.timeout_seconds
                if room >= least:
                    # Before it gave up for want of room, the gang has waited as long already.
                    patience = 0.0 if cause.type == NO_ROOM else slots.REGISTRATION_SECONDS
                if time.monotonic() - begun >= patience:
                    break
                if cancelled is None:
                    _logger.warning("%d of %d task slots are there; waiting for executors", room, wanted)
                    cancelled = stack.enter_context(cancellable(self.spark))
                if cancelled.wait(0.25):
                    raise TrainingCancelledError("the training was cancelled while it waited for executors")
        if room is None or room >= wanted:
            return
        if room < least:
            raise RuntimeError(
                f"the cluster has {room} task slots left for the {wanted} workers of the training "
                f"after {cause.sentence}; add executors or lower minWorkers"
            ) from None
        _logger.warning("the training goes on with %d workers instead of %d", room, wanted)
        self.config = self.config.with_workers(room)


def _told(beats: list[Beat]) -> list[Failure]:
    """Returns the failures in the ranks' last beats, because their rows were lost with the job."""
    return [Failure.from_json(beat.failure) for beat in beats if beat.failure is not None]


def _lost(beats: list[Beat], message: str, task: int | None = None) -> list[Failure]:
    """Returns failures of ranks that never reported their end; only of the one that Spark blames, if any."""
    silent = [beat for beat in beats if not beat.ended]
    blamed = [beat for beat in silent if beat.task == task] or silent
    return [Failure.lost(beat.rank, beat.host, beat.phase, message) for beat in blamed]


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    found = [line for line in lines if "ancel" in line] or lines or [""]
    return found[0].strip()[:200]
