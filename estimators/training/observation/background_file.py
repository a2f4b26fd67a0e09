"""Rewrites one file from time to time in a thread; failures and slow stores cost the training nothing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ringspark.pipelines import storage

# Seconds to wait at the end for the last write.
END_SECONDS = 5.0

_log = logging.getLogger(__name__)


class BackgroundFile:
    """A file that is written in the background; failures are only logged. `what` names it in warnings."""

    def __init__(self, uri: str, what: str) -> None:
        self._uri = uri
        self._what = what
        self._thread: threading.Thread | None = None
        self._has_failed = False
        self.cpu_seconds = 0.0
        """CPU time of the last write, without waiting for the store."""

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def write(self, make: Callable[[], bytes]) -> None:
        """Replaces the file by the result of `make`, in the thread, unless a write is in progress."""
        # The next write replaces it, so a flush to disk would only disturb the training.
        self.run(lambda: storage.write_atomic(self._uri, make(), durable=False))

    def run(self, work: Callable[[], None]) -> None:
        """Starts a thread that calls `work` to write the file; does nothing while a write is in progress."""
        if self.is_busy:
            return
        # Daemon, because a hung store must not keep the process alive.
        self._thread = threading.Thread(
            target=self._run, args=(work,), name="ringspark-observation", daemon=True
        )
        self._thread.start()

    def close(self, make: Callable[[], bytes] | None = None) -> None:
        """Writes the result of `make`, if given, a last time; waits only briefly for the store."""
        self.join()
        if make is not None:
            self.write(make)
            self.join()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join(END_SECONDS)

    def _run(self, work: Callable[[], None]) -> None:
        begun = time.thread_time()
        try:
            work()
            self._has_failed = False  # a later outage is logged again
        except Exception as error:  # store clients raise exceptions of any type
            if not self._has_failed:
                _log.warning("the %s was not written (%s); training continues without it", self._what, error)
            self._has_failed = True
        self.cpu_seconds = time.thread_time() - begun
