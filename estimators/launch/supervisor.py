"""Keeps a gang training until it has finished, by starting it again if it was lost or hung.

It starts a gang again from its newest checkpoint, up to `max_restarts` times, if a process, a collective or a
store failed, but not after an error of user code or data. The life of a gang, from launch to launch:

    launch -> all tasks have come -> ranks train -> finished
      ^               |                   |
      |            too few                |-- lost to the cluster: costs no restart
      |               |                   |-- failed: one of `max_restarts`
      +---------------+-------------------+-- free slots: at a checkpoint, with more workers
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePosixPath
from typing import Any, Generic

from pyspark.sql import SparkSession

from ringspark.estimators.failures import LOST, Failure, RegroupError, TrainingCancelledError, WorkerError
from ringspark.estimators.launch import slots
from ringspark.estimators.launch.gang import GangStage
from ringspark.estimators.launch.gang_task import GangTask, Work
from ringspark.estimators.launch.heartbeat import Beat, Pulse
from ringspark.estimators.launch.monitor import NO_ROOM, Monitor
from ringspark.estimators.launch.owner import write_owner
from ringspark.estimators.launch.rank_output import wait_for_output, with_last_lines
from ringspark.estimators.launch.roster import RosterBuilder
from ringspark.estimators.launch.shortage import Shortage
from ringspark.estimators.launch.spares import Spares
from ringspark.estimators.launch.spark_job import SparkJob, cancellable, find_lost_workers, was_cancelled
from ringspark.estimators.launch.taken import FREE_LOSSES, find_taken
from ringspark.estimators.stages.session import spark_conf
from ringspark.estimators.training.checkpoint.folders import checkpoints_uri, is_committed, list_steps
from ringspark.estimators.training.settings.values import C
from ringspark.pipelines.job_names import name_jobs
from ringspark.pipelines.spark_errors import advise_on_loss

# Wait after a cancelled job: longer than Spark takes to kill a Python worker that does not react.
END_SECONDS = 15.0

# A gang grows once no more slots have become free for this time, or as many as it can use.
_SETTLED_SECONDS = 10.0

# The driver notices a lost process within this time.
_NOTICE_SECONDS = 30.0

# Finds the task that Spark blames in its report of a failed job.
_TASK = re.compile(r"(?:ResultTask\(\d+, |Task )(\d+)")

_logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Supervisor(Generic[C]):
    """Runs one gang.

    Attributes:
        config: The settings, with the number of workers of the current launch.
        restarts: The reason of each restart that counts for `max_restarts`.
        preemptions: The reason of each loss to the cluster, which costs no restart.
    """

    spark: SparkSession
    config: C
    make_work: Callable[[C], Work]
    token: str
    check_data: Callable[[], None] | None = None
    restarts: list[str] = field(default_factory=list)
    preemptions: list[str] = field(default_factory=list)
    seconds_lost: float = 0.0
    _stage: Any = None
    _pulse: Pulse = field(init=False)
    _launches: int = 0
    # Tasks that came to the last launch, and slots that were free next to it.
    _came: int = 0
    _more: int = 0
    _more_since: float = 0.0
    _size_before: int | None = None
    _was_hung: bool = False
    _failed_at: float | None = None
    _regroups: bool = False
    _launched_at: float = 0.0
    _lost_executors: set[str] = field(default_factory=set)
    _newest: int = 0
    _free: int = FREE_LOSSES

    def __post_init__(self) -> None:
        self._least = self.config.min_workers or self.config.num_workers
        self._target = self.config.max_workers or self.config.num_workers

    def run(self) -> list[str]:
        """Blocks until the gang has finished or has failed for good; returns one text per rank, in order."""
        self._stage = GangStage(self.spark, self.config.use_gpu)
        conf = spark_conf(self.spark)
        self._is_barrier = not slots.runs_as_tasks(conf, self.config.launch)
        self._shortage = Shortage(self.spark, conf, self._least)
        # A gang that may grow reserves slots for maxWorkers.
        most = self._target if self.config.can_grow and self._stage.can_grow else self.config.num_workers
        with self._stage.turn(most):
            while True:
                try:
                    return self._launch()
                except WorkerError as error:
                    self._prepare_next(error)

    def _prepare_next(self, error: WorkerError) -> None:
        """Prepares the next launch after the end of one; raises if there must be none."""
        cause, size = error.first, self.config.num_workers
        before, self._size_before = self._size_before, None
        grows = all(each.type == RegroupError.__name__ or each.from_peer for each in error.failures)
        if grows and cause.type == RegroupError.__name__:
            self._size_before = size
            self.config = self.config.with_workers(min(size + self._more, self._target))
            _logger.warning("the training continues with %d workers", self.config.num_workers)
            return
        if cause.type == RegroupError.__name__:  # a rank was lost while the others ended
            cause = next(f for f in error.failures if f.type != cause.type and not f.from_peer)
        if cause.type == NO_ROOM and not self._is_barrier:
            self.config = self._shortage.solve(cause, self.config, self._came, self._launches - 1)
            return
        if cause.type == NO_ROOM and before is not None:
            self.config = self.config.with_workers(before)  # the slots were taken by others meanwhile
            return
        if not error.may_pass:
            raise self._final_error(error) from None
        taken = self._find_taken(cause)
        if taken and self.config.max_restarts and self._has_advanced():
            self.preemptions.append(f"{cause.sentence} ({taken})")
            _logger.warning("starting the workers again, because the cluster took an executor: %s", taken)
        elif len(self.restarts) >= self.config.max_restarts:
            raise self._final_error(error) from None
        else:
            self.restarts.append(cause.sentence)
            _logger.warning(
                "restarting the workers (restart %d of %d): %s",
                len(self.restarts),
                self.config.max_restarts,
                cause.sentence,
            )
        wait_for_output(cause, self._pulse)
        if self._is_barrier:
            self._make_room(cause)
        if self.check_data is not None:
            # If the store does not answer now, the workers will wait for it.
            with suppress(OSError):
                self.check_data()

    def _find_taken(self, cause: Failure) -> str | None:
        """Returns why the cluster took an executor, if that was the cause."""
        if cause.type != LOST:
            return None
        # A worker that hangs is the cluster's loss only if Spark has removed its executor.
        lasts = _NOTICE_SECONDS + (self.config.timeout_seconds if self._was_hung else 0.0)
        # Ignores executors removed before this launch.
        since = max(self._launched_at, time.time() - lasts)
        message = "" if self._was_hung else cause.message
        return find_taken(self._stage, since, message, self._lost_executors)

    def _has_advanced(self) -> bool:
        """Whether this loss costs no restart: `FREE_LOSSES` are free after each new checkpoint."""
        root = checkpoints_uri(self.config.run_uri)
        # The store may not answer now.
        with suppress(OSError):
            newest = max((step for step in list_steps(root) if is_committed(root, step)), default=0)
            if newest > self._newest:
                self._newest, self._free = newest, FREE_LOSSES
        self._free -= 1
        return self._free >= 0

    def _launch(self) -> list[str]:
        config, launch = self.config, self._launches
        self._launches += 1
        self._regroups, self._more, self._launched_at = False, 0, time.time()
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
            is_barrier=self._is_barrier,
        )
        job = SparkJob(self.spark)
        builder = None
        if not self._is_barrier:
            may_copy = spark_conf(self.spark).get("spark.speculation", "").lower() == "true"
            builder = RosterBuilder(pulse=pulse, num_tasks=config.num_workers, may_copy=may_copy)
        more = self._target - config.num_workers if config.can_grow and self._stage.can_grow else 0
        with Spares(self._stage, pulse, more - more % config.workers_per_replica) as spares:
            monitor = Monitor(
                pulse,
                config.num_workers,
                job,
                self._stage.slots,
                builder,
                partial(self._shortage.find, config=config, launch=launch),
                partial(self._on_training, spares),
            )
            try:
                with monitor, name_jobs(self.spark, self._describe()):
                    rows = self._stage.run(task, config.num_workers, job, is_barrier=self._is_barrier)
                if len(rows) < config.num_workers:
                    raise RuntimeError(
                        "the workers ended before they trained, because another driver has taken over the "
                        "run; let only one driver work on a run"
                    )
            except Exception as error:
                self._failed_at = self._failed_at or time.monotonic()
                cause, self._was_hung = self._find_cause(error, monitor), monitor.was_hung
                if isinstance(cause, (WorkerError, TrainingCancelledError)):
                    job.wait_until_ended(END_SECONDS)
                if builder is not None:
                    self._came = len(builder.offers)
                    replaced = builder.find_replaced()
                    self._lost_executors = {offer.executor for offer in replaced}
                    # Without a roster, the tasks never became workers.
                    is_gang = builder.roster is not None and builder.roster.offers
                    self._shortage.survivors = self._came - len(replaced) if is_gang else 0
                raise cause from None
            except BaseException:
                # After Ctrl-C the folder may be removed next, and then no rank may write into it.
                job.wait_until_ended(END_SECONDS)
                raise
        failures = [Failure.from_json(row.failure) for row in rows if row.failure is not None]
        if failures:
            self._failed_at = self._failed_at or time.monotonic()
            raise WorkerError(failures)
        return [str(row.result) for row in rows]

    def _on_training(self, spares: Spares) -> None:
        """Counts the time lost, and asks the ranks to end at a checkpoint once there is room for more."""
        now = time.monotonic()
        if self._failed_at is not None:
            self.seconds_lost += now - self._failed_at
            self._failed_at = None
        found = spares.count()
        more = found - found % self.config.workers_per_replica
        if more != self._more:
            self._more, self._more_since = more, now
        # Executors come one after the other, and each end at a checkpoint costs seconds.
        is_settled = found == spares.num_tasks or now - self._more_since >= _SETTLED_SECONDS
        if more and is_settled and not self._regroups:
            write_owner(self.config.run_uri, self.token, self._pulse.launch, regroups=True)
            self._regroups = True

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
        advice = advise_on_loss(error.first.message) if error.first.type == LOST else ""
        if not error.may_pass or not self.restarts:
            return WorkerError(failures, advice)
        times = "once" if len(self.restarts) == 1 else f"{len(self.restarts)} times"
        return WorkerError(
            failures, f"; the workers had already been restarted {times} (maxRestarts){advice}"
        )

    def _make_room(self, cause: Failure) -> None:
        """Waits until the workers fit again; if they do not, continues with fewer replicas."""
        wanted, replica = self.config.num_workers, self.config.workers_per_replica
        least, begun = min(self._least, wanted), time.monotonic()
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
