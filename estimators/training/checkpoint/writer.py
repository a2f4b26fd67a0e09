"""Writes checkpoints in a thread, one at a time, while the training goes on.

A failed write costs that checkpoint but not the training: it is logged and kept in `errors`, and the next
checkpoint is tried when it is due. A half-written folder is removed if the store allows it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from ringspark.estimators.training.checkpoint.folders import (
    keep_newest,
    remove_unfinished,
    remove_unfinished_one,
    step_uri,
)
from ringspark.estimators.training.checkpoint.parts import PartError, tell
from ringspark.estimators.training.checkpoint.snapshot import Snapshot, write_part, write_snapshot

# Number of errors that a result reports; the log has all.
MAX_ERRORS = 20
_LOOK_SECONDS = 1.0
# Short, because after a failure somebody waits for the end of the training.
_LAST_SECONDS = 2.0

_log = logging.getLogger(__name__)


class _AbandonedError(Exception):
    """The training has failed, so this checkpoint is no longer needed."""


class BackgroundWriter:
    """Writes checkpoints on rank 0, and parts of them on other ranks.

    Attributes:
        errors: One sentence per checkpoint that could not be written, at most `MAX_ERRORS`.
        is_mute: Whether this rank could not write its part of the last checkpoint, nor tell rank 0 so.
    """

    def __init__(self, root: str, keep: int) -> None:
        self._root = root
        self._keep = keep
        self._thread: threading.Thread | None = None
        self._abandoned = threading.Event()
        self._hopeless = ""
        self.errors: list[str] = []
        self.is_mute = False

    def clear(
        self, step: int, seconds: float = float("inf"), progress: Callable[[], None] = lambda: None
    ) -> str:
        """Makes room for a checkpoint that several ranks write, before any of them begins.

        Args:
            seconds: How long the other ranks can wait for it; what takes longer goes on as a write does.
            progress: Called once per second.

        Returns:
            Why there is none; empty if there is.
        """
        reasons: list[str] = []

        def remove() -> None:
            try:
                remove_unfinished(self._root, step)
            except Exception as error:
                reasons.append(f"{type(error).__name__}: {error}")

        self._start(remove)
        if not self.wait(seconds, progress):
            return f"unfinished ones were not removed within {seconds:g} s, the store does not answer"
        return "".join(reasons)

    def start(self, snapshot: Snapshot) -> None:
        """Starts a write; the previous one must have ended."""
        self._hopeless, self.is_mute = "", False
        self._start(partial(self._write, snapshot))

    def _start(self, work: Callable[[], None]) -> None:
        assert self._thread is None
        # Daemon: a hung store must not keep the process alive.
        self._thread = threading.Thread(target=work, name="ringspark-checkpoint", daemon=True)
        self._thread.start()

    def wait(self, seconds: float = float("inf"), progress: Callable[[], None] = lambda: None) -> bool:
        """Waits for the running write, or `clear`; returns whether it has ended.

        Args:
            progress: Called once per second.
        """
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
        """Ends the running write at its next block, or look for other parts; the next ones are tried."""
        self._hopeless = reason

    def abandon(self) -> None:
        """Waits a little for the running write, then stops it at its next block; for use after a failure."""
        if not self.wait(_LAST_SECONDS):
            self._abandoned.set()
            self.wait(_LOOK_SECONDS)

    def note(self, step: int, error: str) -> None:
        """Keeps and logs why the checkpoint of `step` is missing."""
        text = f"the checkpoint of step {step} was not written ({error}); the training goes on without it"
        _log.warning("%s", text)
        if len(self.errors) < MAX_ERRORS:
            self.errors.append(text)

    def _check(self) -> None:
        if self._abandoned.is_set():
            raise _AbandonedError
        if self._hopeless:
            raise PartError(self._hopeless)

    def _write(self, snapshot: Snapshot) -> None:
        step = snapshot.record.position.step
        if snapshot.part.number:
            self._write_part(step, snapshot)
            return
        try:
            if snapshot.part.of == 1:
                remove_unfinished(self._root, step)
            write_snapshot(step_uri(self._root, step), snapshot, self._check)
        except Exception as error:  # a store's client raises what it likes
            if not isinstance(error, _AbandonedError):
                self.note(step, f"{type(error).__name__}: {error}")
            with suppress(Exception):
                remove_unfinished_one(self._root, step)
            return
        try:
            keep_newest(self._root, step, self._keep)
        except Exception as error:
            _log.warning("old checkpoints in %s could not be removed: %s", self._root, error)

    def _write_part(self, step: int, snapshot: Snapshot) -> None:
        uri = step_uri(self._root, step)
        try:
            tell(uri, snapshot.part, write_part(uri, snapshot, self._check))
        except _AbandonedError:
            return
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            self.note(step, text)
            try:
                tell(uri, snapshot.part, {}, text)
            except Exception:
                # The first writer waits in vain until the ranks meet, and no longer than for a hung rank.
                self.is_mute = True
