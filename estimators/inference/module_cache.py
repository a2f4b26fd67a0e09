"""Keeps the modules that a process predicts with, and lets them go a minute after their last use.

A Python worker of Spark runs the tasks of many jobs: without an end it would hold gigabytes of a model that
nobody asks for any more. A stream or a pipeline asks again within the minute.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

KEEP_SECONDS = 60.0
# A pipeline has a few models, but a worker of a CrossValidator switches between many.
MAX_MODULES = 4

T = TypeVar("T")


class ModuleCache(Generic[T]):
    """At most `MAX_MODULES` modules, none of them unused for longer than `keep_seconds`.

    A task that runs holds its module itself, so a module that is let go stays whole for it.
    """

    def __init__(self, keep_seconds: float = KEEP_SECONDS) -> None:
        self.keep_seconds = keep_seconds
        # Key -> (module, time of its last use); the least recently used comes first.
        self._known: dict[Hashable, tuple[T, float]] = {}
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def get(self, key: Hashable, load: Callable[[], T]) -> T:
        """Returns the module of this key, loaded if it is not there."""
        with self._lock:
            found = self._known.pop(key, None)
            while found is None and len(self._known) >= MAX_MODULES:
                self._known.pop(next(iter(self._known)))
            module = load() if found is None else found[0]
            self._known[key] = module, time.monotonic()
            self._watch()
        return module

    def clear(self) -> None:
        """Lets all modules go."""
        with self._lock:
            self._known.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def __len__(self) -> int:
        return len(self._known)

    def _watch(self) -> None:
        """Sets the timer for the module that is the next to go; the lock is held."""
        if self._timer is None and self._known:
            _, used = next(iter(self._known.values()))
            wait = max(0.0, used + self.keep_seconds - time.monotonic())
            self._timer = threading.Timer(wait, self._let_go)
            # Nothing that the process's end has to wait for.
            self._timer.daemon = True
            self._timer.start()

    def _let_go(self) -> None:
        with self._lock:
            self._timer = None
            oldest = time.monotonic() - self.keep_seconds
            self._known = {key: known for key, known in self._known.items() if known[1] > oldest}
            self._watch()
