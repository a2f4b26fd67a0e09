"""Follows a training from the driver and tells the trackers of it.

One thread reads the files that rank 0 writes to the run directory. Each tracker has a queue and a thread of
its own, so that one that hangs holds up neither the training nor the others. At the end they are waited for
some seconds, and no longer.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ringspark.estimators.tracking.base import Listener, RunEnd, RunStart, Tracker
from ringspark.estimators.training.history import EpochRecord, read_history, read_progress
from ringspark.estimators.training.step_log import WRITE_SECONDS, WRITE_SHARE, StepFiles
from ringspark.pipelines import storage

_log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
# A listing of a remote store costs a request, and its news are of seconds.
REMOTE_POLL_SECONDS = 5.0
# Seconds for all trackers together to take in what came last; logging a model may take some.
END_SECONDS = 60.0
# A tracker that failed so often in a row is told of nothing but the end.
MAX_FAILURES = 3

Call = Callable[[Listener], None]


class RunWatcher:
    """A context manager around a training. What ends with an error tells the trackers of it."""

    def __init__(self, run: RunStart, trackers: Sequence[Tracker]) -> None:
        self._run = run
        self._channels = [_Channel(tracker, run) for tracker in trackers]
        self._stop = threading.Event()
        self._reader = threading.Thread(target=self._read, name="ringspark-watcher", daemon=True)
        self._steps = StepFiles(run.run_uri)
        self._told_steps: dict[int, tuple[float, float]] = {}
        self._told_epochs: list[EpochRecord] = []

    def __enter__(self) -> RunWatcher:
        if self._channels:
            for channel in self._channels:
                channel.thread.start()
            self._reader.start()
        return self

    def __exit__(self, _: Any, error: BaseException | None, *__: Any) -> None:
        if error is not None:
            is_cancelled = isinstance(error, KeyboardInterrupt) or "Cancelled" in type(error).__name__
            words = storage.redact_text(f"{type(error).__name__}: {error}")
            self.end(RunEnd(status="cancelled" if is_cancelled else "failed", error=words))
        else:
            self.end(RunEnd(status="finished"))

    def end(self, end: RunEnd) -> None:
        """Tells the trackers how the training ended, and waits for them; a second call does nothing."""
        if not self._channels or self._stop.is_set():
            return
        # It reads once more after the stop, so that the last epoch is told too.
        self._stop.set()
        deadline = time.monotonic() + END_SECONDS
        # A store that hangs is no reason to wait for ever.
        self._reader.join(END_SECONDS / 2)
        for channel in self._channels:
            channel.put(lambda listener: listener.end(end), always=True)
            channel.put(None)
        for channel in self._channels:
            channel.thread.join(max(0.0, min(deadline, channel.gives_up_at) - time.monotonic()))
            if channel.thread.is_alive():
                _log.warning(
                    "the tracker %s has not answered for %.0f s and is left alone; what it shows of %s may "
                    "lack the end",
                    channel.name,
                    END_SECONDS,
                    self._run.name,
                )

    def _read(self) -> None:
        poll = POLL_SECONDS if storage.is_local(self._run.run_uri) else REMOTE_POLL_SECONDS
        begun = asked = time.monotonic()
        while True:
            is_last = self._stop.wait(poll)
            # Whatever a store's client raises: it may fail for a moment, and the files only inform.
            with suppress(Exception):
                self._tell_progress()
            with suppress(Exception):
                self._tell_epochs()
            now = time.monotonic()
            if is_last or now - asked >= max(WRITE_SECONDS, WRITE_SHARE * (now - begun)):
                asked = now
                with suppress(Exception):
                    self._tell_steps()
            if is_last:
                return

    def _tell_progress(self) -> None:
        progress = read_progress(self._run.run_uri)
        if progress is not None:
            for channel in self._channels:
                # A slow tracker needs no old positions.
                if channel.is_free:
                    channel.put(lambda listener: listener.progress(progress))

    def _tell_epochs(self) -> None:
        history = read_history(self._run.run_uri)
        if len(history) != len(self._told_epochs):
            with suppress(OSError, ValueError):
                self._tell_steps()
        for index, record in enumerate(history):
            told = self._told_epochs[index] if index < len(self._told_epochs) else None
            self._told_epochs[index : index + 1] = [record]
            if told is None or _numbers(told) != _numbers(record):
                self._tell(lambda listener, record=record: listener.epoch(record))  # type: ignore[misc]

    def _tell_steps(self) -> None:
        for records in self._steps.read_new():
            new = [r for r in records if self._told_steps.get(r.step) != (r.train_loss, r.learning_rate)]
            self._told_steps |= {r.step: (r.train_loss, r.learning_rate) for r in new}
            if new:
                self._tell(lambda listener, new=new: listener.steps(new))  # type: ignore[misc]

    def _tell(self, call: Call) -> None:
        for channel in self._channels:
            channel.put(call)


class _Channel:
    """One tracker's queue and the thread that empties it."""

    def __init__(self, tracker: Tracker, run: RunStart) -> None:
        self._tracker, self._run = tracker, run
        self._calls: queue.SimpleQueue[tuple[Call, bool] | None] = queue.SimpleQueue()
        # When the call under way began.
        self._begun: float | None = None
        self.name = tracker.name or type(tracker).__name__
        self.thread = threading.Thread(target=self._work, name=f"ringspark-tracker-{self.name}", daemon=True)

    @property
    def is_free(self) -> bool:
        return self._calls.empty()

    @property
    def gives_up_at(self) -> float:
        """When the call under way has taken too long; one that hung in mid-training is not waited for."""
        begun = self._begun
        return (time.monotonic() if begun is None else begun) + END_SECONDS

    def put(self, call: Call | None, always: bool = False) -> None:
        """Queues a call; None ends the thread. `always`: also to a tracker that has failed."""
        self._calls.put(None if call is None else (call, always))

    def _work(self) -> None:
        listener = None
        failures = 0
        self._begun = time.monotonic()
        try:
            listener = self._tracker.start(self._run)
        except Exception as error:
            self._warn(error, "is told nothing of this training")
        self._begun = None
        while (entry := self._calls.get()) is not None:
            call, always = entry
            if listener is None or (failures >= MAX_FAILURES and not always):
                continue
            self._begun = time.monotonic()
            try:
                call(listener)
                failures = 0
            except Exception as error:
                failures += 1
                if failures in (1, MAX_FAILURES):
                    told = "is told only of the end" if failures == MAX_FAILURES else "may lack a part"
                    self._warn(error, told)
            self._begun = None

    def _warn(self, error: Exception, told: str) -> None:
        _log.warning(
            "the tracker %s failed (%s: %s) and %s; the training goes on",
            self.name,
            type(error).__name__,
            storage.redact_text(str(error).split("\n", 1)[0])[:300],
            told,
        )


def _numbers(record: EpochRecord) -> str:
    """Returns the record without its times, in a form in which NaN equals NaN."""
    return repr({key: value for key, value in record.row().items() if key != "seconds"})
