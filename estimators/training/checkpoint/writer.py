"""Writes checkpoints in a thread, one at a time, while training continues.

A failed write costs that checkpoint, not the training: it is logged and kept in `errors`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from ringspark.estimators.training.checkpoint.folders import keep_newest, remove_unfinished, step_uri
from ringspark.estimators.training.checkpoint.shards import ShardError, report_shard
from ringspark.estimators.training.checkpoint.snapshot import Snapshot, write_shard, write_snapshot
from ringspark.estimators.training.checkpoint.weights import CheckpointInfo

# Number of errors that a result reports; all are logged.
MAX_ERRORS = 20
_LOOK_SECONDS = 1.0
# Short, because after a failure the user waits for the end of the training.
_LAST_SECONDS = 2.0

_log = logging.getLogger(__name__)


class _AbandonedError(Exception):
    """The training has failed, so this checkpoint is no longer needed."""


class BackgroundWriter:
    """Writes checkpoints on rank 0, and shards of them on other ranks.

    `is_mute` is True if this rank could neither write its last shard nor report the failure.
    """

    def __init__(self, root: str, keep: int) -> None:
        self._root = root
        self._keep = keep
        self.on_commit: Callable[[CheckpointInfo], None] = lambda info: None
        self._thread: threading.Thread | None = None
        self._abandoned = threading.Event()
        self._hopeless = ""
        self.errors: list[str] = []
        self.is_mute = False

    def clear(
        self, step: int, seconds: float = float("inf"), progress: Callable[[], None] = lambda: None
    ) -> str:
        """Removes incomplete checkpoints within `seconds`; returns why this failed, or an empty text."""
        reasons: list[str] = []

        def remove() -> None:
            try:
                remove_unfinished(self._root, step)
            except Exception as error:
                reasons.append(f"{type(error).__name__}: {error}")

        self._start(remove)
        if not self.wait(seconds, progress):
            return f"incomplete checkpoints were not removed in {seconds:g} s: the store does not answer"
        return "".join(reasons)

    def start(self, snapshot: Snapshot) -> None:
        self._hopeless, self.is_mute = "", False
        self._start(partial(self._write, snapshot))

    def _start(self, work: Callable[[], None]) -> None:
        assert self._thread is None
        # Daemon, because a hung store must not keep the process alive.
        self._thread = threading.Thread(target=work, name="ringspark-checkpoint", daemon=True)
        self._thread.start()

    def wait(self, seconds: float = float("inf"), progress: Callable[[], None] = lambda: None) -> bool:
        end = time.monotonic() + seconds
        while self._thread is not None:
            self._thread.join(max(0.0, min(_LOOK_SECONDS, end - time.monotonic())))
            if not self._thread.is_alive():
                self._thread = None
            elif time.monotonic() >= end:
                return False
            progress()
        return True

    def give_up(self, reason: str) -> None:
        """Ends the running write at its next block; later checkpoints are still written."""
        self._hopeless = reason

    def abandon(self) -> None:
        """Waits briefly for the running write, then ends it at its next block."""
        if not self.wait(_LAST_SECONDS):
            self._abandoned.set()
            self.wait(_LOOK_SECONDS)

    def note(self, step: int, error: str) -> None:
        text = f"the checkpoint of step {step} was not written ({error}); training continues without it"
        _log.warning("%s", text)
        if len(self.errors) < MAX_ERRORS:
            self.errors.append(text)

    def _check(self) -> None:
        if self._abandoned.is_set():
            raise _AbandonedError
        if self._hopeless:
            raise ShardError(self._hopeless)

    def _write(self, snapshot: Snapshot) -> None:
        step = snapshot.record.position.step
        if snapshot.shard.number:
            self._write_shard(step, snapshot)
            return
        try:
            if snapshot.shard.of == 1:
                remove_unfinished(self._root, step)
            self.on_commit(write_snapshot(step_uri(self._root, step), snapshot, self._check))
        except Exception as error:  # store clients raise exceptions of any type
            if not isinstance(error, _AbandonedError):
                self.note(step, f"{type(error).__name__}: {error}")
            with suppress(Exception):
                remove_unfinished(self._root)
            return
        try:
            keep_newest(self._root, step, self._keep)
        except Exception as error:
            _log.warning("old checkpoints in %s could not be removed: %s", self._root, error)

    def _write_shard(self, step: int, snapshot: Snapshot) -> None:
        uri = step_uri(self._root, step)
        try:
            report_shard(uri, snapshot.shard, write_shard(uri, snapshot, self._check))
        except _AbandonedError:
            return
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            self.note(step, text)
            try:
                report_shard(uri, snapshot.shard, {}, text)
            except Exception:
                # The first writer waits until the ranks next synchronize, at most as long as for a hung rank.
                self.is_mute = True
