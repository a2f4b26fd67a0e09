"""Guards the state that all threads of a process share: torch's random numbers and traces, stderr, warnings.

Searches and Spark's `CrossValidator` build, check and save networks from several threads of the driver.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from typing import Any

import torch

PROCESS = threading.RLock()
"""Held by the thread that traces a network or changes global state of torch, which is not thread-safe."""


@contextmanager
def forked_random(devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Restores torch's random state at the end. Until then other threads wait where they fork it too."""
    with PROCESS, torch.random.fork_rng(devices=devices):
        yield


@contextmanager
def ignored_warnings(message: str = "", category: type[Warning] = Warning) -> Iterator[None]:
    """Ignores warnings of this thread.

    Args:
        message: Pattern of the beginning of the text.
    """
    thread = _ThisThread(message)
    # Not by `catch_warnings`: of two threads, the second to leave it restores the first one's filters.
    filters: Any = warnings.filters
    entry = ("ignore", thread, category, None, 0)
    filters.insert(0, entry)
    try:
        yield
    finally:
        thread.has_ended = True
        with suppress(ValueError):  # another thread has left its `catch_warnings`
            filters.remove(entry)


@contextmanager
def quiet() -> Iterator[None]:
    """Drops what this thread writes to stderr, warns of, and logs as a warning or less."""
    thread = _ThisThread()
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = {handler for logger in loggers for handler in getattr(logger, "handlers", ())}
    handlers.add(logging.lastResort)
    for handler in handlers:
        handler.addFilter(thread)
    try:
        with redirect_stderr(_OtherThreads(sys.stderr, thread)), ignored_warnings():
            yield
    finally:
        thread.has_ended = True
        for handler in handlers:
            handler.removeFilter(thread)


class _ThisThread:
    """Recognizes the thread that made it; nothing after its end, should it then still be in a list."""

    def __init__(self, message: str = "") -> None:
        self._ident = threading.get_ident()
        self._pattern = re.compile(message, re.IGNORECASE)
        self.has_ended = False

    def is_running(self) -> bool:
        return not self.has_ended and threading.get_ident() == self._ident

    def match(self, text: str) -> bool:
        """Returns whether a warning is ignored; `warnings` calls it in place of a pattern's method."""
        return self.is_running() and self._pattern.match(text) is not None

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether a handler takes the record."""
        return not self.is_running() or record.levelno > logging.WARNING


class _OtherThreads:
    """A stream that drops the text of one thread."""

    def __init__(self, stream: Any, thread: _ThisThread) -> None:
        self._stream, self._thread = stream, thread

    def write(self, text: str) -> int:
        return len(text) if self._thread.is_running() else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
