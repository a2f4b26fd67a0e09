"""Follows a training from the driver and notifies the trackers.

Each tracker has its own queue and thread, so a tracker that hangs delays nothing else.
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
# A listing of a remote store costs a request, and its files change every few seconds.
REMOTE_POLL_SECONDS = 5.0
# Seconds for all trackers together to handle the last calls; logging a model may take some.
END_SECONDS = 60.0
# After this many failures in a row, a tracker receives only the end.
MAX_FAILURES = 3

Call = Callable[[Listener], None]


class RunWatcher:
    """A context manager around a training. If an exception leaves the block, the trackers are notified."""

    def __init__(self, run: RunStart, trackers: Sequence[Tracker]) -> None:
        self._run = run
        self._channels = [_Channel(tracker, run) for tracker in trackers]
        self._stop = threading.Event()
        self._reader = threading.Thread(target=self._read, name="ringspark-watcher", daemon=True)
        self._steps = StepFiles(run.run_uri)
        # Records that the trackers have received.
        self._sent_steps: dict[int, tuple[float, float]] = {}
        self._sent_epochs: list[EpochRecord] = []

    def __enter__(self) -> RunWatcher:
        if self._channels:
            for channel in self._channels:
                channel.thread.start()
            self._reader.start()
        return self

    def __exit__(self, _: Any, error: BaseException | None, *__: Any) -> None:
        if error is None:
            self.end(RunEnd(status="finished"))
            return
        is_cancelled = isinstance(error, KeyboardInterrupt) or "Cancelled" in type(error).__name__
        text = storage.redact_text(f"{type(error).__name__}: {error}")
        self.end(RunEnd(status="cancelled" if is_cancelled else "failed", error=text))

    def end(self, end: RunEnd) -> None:
        """Reports the end of the training to the trackers and waits for them; only the first call counts."""
        if not self._channels or self._stop.is_set():
            return
        # The reader reads once more after the stop, to include the last epoch.
        self._stop.set()
        deadline = time.monotonic() + END_SECONDS
        # A limit, because the store may hang.
        self._reader.join(END_SECONDS / 2)
        for channel in self._channels:
            channel.put(lambda listener: listener.end(end), always=True)
            channel.put(None)
        for channel in self._channels:
            channel.thread.join(max(0.0, min(deadline, channel.gives_up_at) - time.monotonic()))
            if channel.thread.is_alive():
                _log.warning(
                    "the tracker %s has not answered for %.0f s and is abandoned; its record of %s may "
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
            # A store's client may fail for a moment and raise anything, and the files only inform.
            with suppress(Exception):
                self._send_progress()
            with suppress(Exception):
                self._send_epochs()
            now = time.monotonic()
            if is_last or now - asked >= max(WRITE_SECONDS, WRITE_SHARE * (now - begun)):
                asked = now
                with suppress(Exception):
                    self._send_steps()
            if is_last:
                return

    def _send_progress(self) -> None:
        progress = read_progress(self._run.run_uri)
        if progress is not None:
            for channel in self._channels:
                # A slow tracker needs no old positions.
                if channel.calls.empty():
                    channel.put(lambda listener: listener.progress(progress))

    def _send_epochs(self) -> None:
        history = read_history(self._run.run_uri)
        if len(history) != len(self._sent_epochs):
            with suppress(OSError, ValueError):
                self._send_steps()
        for index, record in enumerate(history):
            sent = self._sent_epochs[index] if index < len(self._sent_epochs) else None
            self._sent_epochs[index : index + 1] = [record]
            if sent is None or _numbers(sent) != _numbers(record):
                self._send(lambda listener, record=record: listener.epoch(record))  # type: ignore[misc]

    def _send_steps(self) -> None:
        for records in self._steps.read_new():
            new = [r for r in records if self._sent_steps.get(r.step) != (r.train_loss, r.learning_rate)]
            self._sent_steps |= {r.step: (r.train_loss, r.learning_rate) for r in new}
            if new:
                self._send(lambda listener, new=new: listener.steps(new))  # type: ignore[misc]

    def _send(self, call: Call) -> None:
        for channel in self._channels:
            channel.put(call)


class _Channel:
    def __init__(self, tracker: Tracker, run: RunStart) -> None:
        self._tracker, self._run = tracker, run
        self.calls: queue.SimpleQueue[tuple[Call, bool] | None] = queue.SimpleQueue()
        # Start of the call in progress.
        self._begun: float | None = None
        self.name = tracker.name or type(tracker).__name__
        self.thread = threading.Thread(target=self._work, name=f"ringspark-tracker-{self.name}", daemon=True)

    @property
    def gives_up_at(self) -> float:
        """Time to stop waiting: `END_SECONDS` after the running call began, or after now if no call runs."""
        begun = self._begun
        return (time.monotonic() if begun is None else begun) + END_SECONDS

    def put(self, call: Call | None, always: bool = False) -> None:
        """Queues a call; None ends the thread. A tracker that failed too often gets only `always` calls."""
        self.calls.put(None if call is None else (call, always))

    def _work(self) -> None:
        listener = None
        failures = 0
        self._begun = time.monotonic()
        try:
            listener = self._tracker.start(self._run)
        except Exception as error:
            self._warn(error, "receives nothing")
        self._begun = None
        while (entry := self.calls.get()) is not None:
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
                    self._warn(
                        error, "receives only the end" if failures == MAX_FAILURES else "may miss events"
                    )
            self._begun = None

    def _warn(self, error: Exception, effect: str) -> None:
        _log.warning(
            "the tracker %s failed (%s: %s) and %s of this training, which continues",
            self.name,
            type(error).__name__,
            storage.redact_text(str(error).split("\n", 1)[0])[:300],
            effect,
        )


def _numbers(record: EpochRecord) -> str:
    # Text, because NaN does not equal itself.
    return repr({key: value for key, value in record.row().items() if key != "seconds"})
