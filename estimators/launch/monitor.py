"""The driver's thread beside the Spark job of a gang: reads the signs of life and acts on them.

The thread that waits for the job can do nothing else. This one cancels the job where a rank hangs, or
where Spark waits for slots that are gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ringspark.estimators import run_layout
from ringspark.estimators.failures import Failure
from ringspark.estimators.launch import slots
from ringspark.estimators.launch.hang_detector import HangDetector
from ringspark.estimators.launch.heartbeat import Beat, Pulse, interval_seconds, read_beats
from ringspark.estimators.launch.spark_job import SparkJob
from ringspark.pipelines import storage

POLL_SECONDS = 0.5

# The type of the failure of a gang that Spark has no slots for.
NO_ROOM = "NoRoom"


class Monitor:
    """A context manager around one job.

    Attributes:
        verdict: Why this thread cancelled the job, None where it did not.
    """

    def __init__(
        self,
        pulse: Pulse,
        num_workers: int,
        job: SparkJob,
        count_slots: Callable[[], int | None],
    ) -> None:
        self._pulse = pulse
        self._num_workers = num_workers
        self._job = job
        self._count_slots = count_slots
        self._hang_detector = HangDetector(num_workers, pulse.timeout_seconds)
        self._full_at = time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ringspark-monitor", daemon=True)
        self.verdict: Failure | None = None

    @property
    def beats(self) -> list[Beat]:
        """The last signs of life."""
        return self._hang_detector.beats

    def __enter__(self) -> Monitor:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        self._thread.join()
        # What the ranks said last.
        with suppress(OSError):
            self._look()

    def _run(self) -> None:
        # A far store is asked no more often than there is news.
        interval = interval_seconds(self._pulse.timeout_seconds)
        poll = POLL_SECONDS if storage.is_local(self._pulse.run_uri) else max(POLL_SECONDS, interval / 2)
        while not self._done.wait(poll):
            # Neither the store nor Spark need answer at once, and a training must not end by that.
            with suppress(Exception):
                self.verdict = self._judge()
            if self.verdict is not None:
                self._job.cancel()
                return

    def _look(self) -> None:
        beats = read_beats(self._pulse.run_uri, self._num_workers, self._pulse.token, self._pulse.launch)
        self._hang_detector.look(beats, time.monotonic())

    def _store_takes_files(self) -> bool:
        try:
            storage.write_atomic(
                storage.join(self._pulse.run_uri, run_layout.HEARTBEAT, "driver.json"), b"{}"
            )
        except Exception:  # a store's client raises what it likes
            return False
        return True

    def _judge(self) -> Failure | None:
        self._look()
        now = time.monotonic()
        hung = self._hang_detector.hung(now)
        if hung is not None and not self._store_takes_files():
            # No rank can give a sign of life either; nor is another start of them what would help.
            self._hang_detector.excuse(now)
            hung = None
        if hung is not None:
            host, phase = (hung.beat.host, hung.beat.phase) if hung.beat else ("unknown", "starting")
            message = f"the worker {hung.reason} (timeoutSeconds={self._pulse.timeout_seconds:g})"
            return Failure.lost(hung.rank, host, phase, message)
        if not self._hang_detector.nobody_works(now):
            self._full_at = now
            return None
        room = self._count_slots()
        if room is None or room >= self._num_workers:
            self._full_at = now
        elif now - self._full_at >= slots.REGISTRATION_SECONDS:
            message = f"Spark has {room} task slots left for {self._num_workers} workers"
            return Failure.lost(0, "unknown", "starting", message, NO_ROOM)
        return None
