"""Monitors a gang from a thread of the driver, while the main thread waits for the Spark job."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from ringspark.estimators import run_layout
from ringspark.estimators.failures import Failure
from ringspark.estimators.launch import slots
from ringspark.estimators.launch.hang_detector import HangDetector
from ringspark.estimators.launch.heartbeat import Beat, Pulse, interval_seconds, read_beats
from ringspark.estimators.launch.roster import RosterBuilder, look_seconds
from ringspark.estimators.launch.spark_job import SparkJob
from ringspark.pipelines import storage

POLL_SECONDS = 0.5
# A pause lasts 19 times the CPU time of the poll: 5 % of a core.
_PAUSE_FACTOR = 19.0
_CANCEL_AGAIN_SECONDS = 2.0
# Spark gets the rows of ranks that have ended within this time.
_LAST_ROW_SECONDS = 60.0
# Beats that are read in parallel from a remote store; in sequence, the first would be old by the last.
_READERS = 16

# Failure type of a gang for which Spark has no slots.
NO_ROOM = "NoRoom"


def pause_after(cpu_seconds: float, interval: float) -> float:
    """Returns the minimum pause after a poll, in seconds; it grows with the number of ranks."""
    return min(_PAUSE_FACTOR * cpu_seconds, interval)


class Monitor:
    """A context manager that cancels the job in its block if a rank hangs or the cluster has no slots.

    `verdict` is the failure for which it cancelled the job, otherwise None, and `was_hung` whether a rank
    hung. If the workers are ordinary tasks, `builder` collects their offers, and `find_shortage` returns why
    they must stop waiting for each other. `on_training` is called at every poll while all ranks train.
    """

    def __init__(
        self,
        pulse: Pulse,
        num_workers: int,
        job: SparkJob,
        count_slots: Callable[[], int | None],
        builder: RosterBuilder | None = None,
        find_shortage: Callable[[RosterBuilder], str | None] = lambda _: None,
        on_training: Callable[[], None] = lambda: None,
    ) -> None:
        self._builder, self._find_shortage, self._on_training = builder, find_shortage, on_training
        self._pulse = pulse
        self._num_workers = num_workers
        self._job = job
        self._count_slots = count_slots
        self._hang_detector = HangDetector(num_workers, pulse.timeout_seconds)
        self._full_at = time.monotonic()
        is_local = storage.is_local(pulse.run_uri)
        self._readers = None if is_local else ThreadPoolExecutor(min(num_workers, _READERS))
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ringspark-monitor", daemon=True)
        self.verdict: Failure | None = None
        self.was_hung = False
        self._ended_at = time.monotonic()

    @property
    def beats(self) -> list[Beat]:
        return self._hang_detector.beats

    def __enter__(self) -> Monitor:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        self._thread.join()
        # Reads the last beats. A store's client may raise anything, but the job's outcome stands.
        with suppress(Exception):
            self._read_beats()
        if self._readers is not None:
            self._readers.shutdown()

    def _run(self) -> None:
        # A remote store is read only as often as beats may change.
        interval = interval_seconds(self._pulse.timeout_seconds)
        poll = POLL_SECONDS if storage.is_local(self._pulse.run_uri) else max(POLL_SECONDS, interval / 2)
        pause = 0.0
        while not self._done.wait(
            max(pause, look_seconds(self._pulse.run_uri) if self._is_gathering else poll)
        ):
            begun = time.process_time()  # a remote store is read by other threads
            # The store or Spark may fail to answer, and that must not end a training.
            with suppress(Exception):
                self.verdict = self._find_failure()
            if self.verdict is not None:
                # Repeated, because a cancel may get lost on its way to Spark.
                while not self._done.is_set():
                    if self._builder is not None:
                        with suppress(Exception):
                            self._builder.dismiss()
                    self._job.cancel()
                    self._done.wait(_CANCEL_AGAIN_SECONDS)
                return
            # Beats change no sooner than after an interval.
            pause = pause_after(time.process_time() - begun, interval)

    @property
    def _is_gathering(self) -> bool:
        return self._builder is not None and self._builder.roster is None

    def _read_beats(self) -> None:
        pulse = self._pulse
        beats = read_beats(pulse.run_uri, self._num_workers, pulse.token, pulse.launch, self._readers)
        self._hang_detector.update(beats, time.monotonic())

    def _find_failure(self) -> Failure | None:
        if self._builder is not None:
            was_gathering = self._is_gathering
            self._builder.look()
            shortage = self._find_shortage(self._builder) if was_gathering else None
            if shortage is not None:
                return Failure.lost(0, "unknown", "starting", shortage, NO_ROOM)
            if self._is_gathering:
                return None
        self._read_beats()
        now = time.monotonic()
        beats = self.beats
        # "training, epoch 3, step 7", and the phases of callbacks, checkpoints and validation.
        if len(beats) == self._num_workers and all(" epoch " in beat.phase for beat in beats):
            with suppress(Exception):  # the store may not answer now
                self._on_training()
        hung = self._hang_detector.find_hung(now)
        if hung is not None:
            try:
                uri = storage.join(self._pulse.run_uri, run_layout.HEARTBEAT, "driver.json")
                storage.write_atomic(uri, b"{}")
            except Exception:  # a store's client may raise anything
                # The ranks cannot write heartbeats either, and a restart would not help.
                self._hang_detector.restart_clocks(now)
                hung = None
        if hung is not None:
            host, phase = (hung.beat.host, hung.beat.phase) if hung.beat else ("unknown", "starting")
            message = f"the worker {hung.reason} (timeoutSeconds={self._pulse.timeout_seconds:g})"
            self.was_hung = True
            return Failure.lost(hung.rank, host, phase, message)
        if self._builder is not None:
            return self._find_replaced(self._builder)
        if not self._hang_detector.is_idle(now):
            self._full_at = now
            return None
        room = self._count_slots()
        if room is None or room >= self._num_workers:
            self._full_at = now
        elif now - self._full_at >= slots.REGISTRATION_SECONDS:
            message = f"Spark has {room} task slots left for {self._num_workers} workers"
            return Failure.lost(0, "unknown", "starting", message, NO_ROOM)
        return None

    def _find_replaced(self, builder: RosterBuilder) -> Failure | None:
        """Returns the failure of a rank whose task has a newer attempt; None if the rank may still live.

        A newer attempt that may be a speculative copy counts only if the rank is silent, or if any rank has
        reported a failure. A rank that has ended is lost if all have ended and its row is missing.
        """
        now, message = time.monotonic(), "its process died, and Spark started its task again"
        by_task = {beat.task: beat for beat in self.beats}
        if len(by_task) < self._num_workers or not all(beat.ended for beat in self.beats):
            self._ended_at = now
        is_over = now - self._ended_at >= min(_LAST_ROW_SECONDS, self._pulse.timeout_seconds)
        for task in (offer.task for offer in builder.find_replaced()):
            beat = by_task.get(task)
            if beat is None:
                # The first heartbeat comes at once.
                interval = interval_seconds(self._pulse.timeout_seconds)
                if not builder.may_copy or now - builder.changed_at >= interval:
                    return Failure.lost(task, "unknown", "starting", message)
                continue
            has_failed = any(each.failure is not None for each in self.beats)
            is_silent = not builder.may_copy or self._hang_detector.is_silent(beat.rank)
            is_gone = not beat.ended and (has_failed or is_silent)
            if is_gone or is_over:
                return Failure.lost(beat.rank, beat.host, beat.phase, message)
        return None
