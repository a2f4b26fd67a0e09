"""Guards what all threads of a process share, such as torch's random state, stderr and GPU memory."""

from __future__ import annotations

import gc
import logging
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from typing import Any

import torch

PROCESS_LOCK = threading.RLock()
"""Lock that a thread holds while it traces a network or changes torch's global state."""


@contextmanager
def fork_generators(devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Restores the random state of the CPU and `devices` after the block, which one thread at a time runs."""
    with PROCESS_LOCK, torch.random.fork_rng(devices=devices):
        yield


@contextmanager
def ignore_warnings(message: str = "", category: type[Warning] = Warning) -> Iterator[None]:
    """Ignores this thread's warnings if their beginning matches the regular expression `message`."""
    thread = _ThisThread(message)
    # `catch_warnings` is not thread-safe: the last thread to leave it may restore another thread's filters.
    filters: Any = warnings.filters
    entry = ("ignore", thread, category, None, 0)
    filters.insert(0, entry)
    try:
        yield
    finally:
        thread.has_ended = True
        with suppress(ValueError):  # another thread's `catch_warnings` has removed the entry already
            filters.remove(entry)


@contextmanager
def silence_thread() -> Iterator[None]:
    """Drops this thread's stderr output, its warnings, and its log records up to level WARNING."""
    thread = _ThisThread()
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = {handler for logger in loggers for handler in getattr(logger, "handlers", ())}
    handlers.add(logging.lastResort)
    for handler in handlers:
        handler.addFilter(thread)
    try:
        with redirect_stderr(_OtherThreads(sys.stderr, thread)), ignore_warnings():
            yield
    finally:
        thread.has_ended = True
        for handler in handlers:
            handler.removeFilter(thread)


@contextmanager
def print_any_text() -> Iterator[None]:
    """Makes print() in the block write "\\xe9" if stdout cannot encode a character, instead of raising."""
    stream: Any = sys.stdout
    errors = getattr(stream, "errors", None)
    lenient = "backslashreplace" if errors in ("strict", "surrogateescape") else errors
    # The user may have put another object there, or closed it.
    with suppress(AttributeError, ValueError, OSError):
        stream.reconfigure(errors=lenient)
    try:
        yield
    finally:
        with suppress(AttributeError, ValueError, OSError):
            stream.reconfigure(errors=errors)


class _ThisThread:
    """Recognizes the thread that created this object; once `has_ended` is set, recognizes no thread."""

    def __init__(self, message: str = "") -> None:
        self._ident = threading.get_ident()
        self._pattern = re.compile(message, re.IGNORECASE)
        self.has_ended = False

    def is_running(self) -> bool:
        return not self.has_ended and threading.get_ident() == self._ident

    def match(self, text: str) -> bool:
        return self.is_running() and self._pattern.match(text) is not None

    def filter(self, record: logging.LogRecord) -> bool:
        return not self.is_running() or record.levelno > logging.WARNING


class _OtherThreads:
    """Output stream that drops the given thread's text and passes on all other text."""

    def __init__(self, stream: Any, thread: _ThisThread) -> None:
        self._stream, self._thread = stream, thread

    def write(self, text: str) -> int:
        return len(text) if self._thread.is_running() else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def release_gpu() -> None:
    """Frees tensors in reference cycles and torch's cache at the end of a task; CUDA's own context stays.

    Spark keeps the task's Python worker for other tasks.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        gc.collect()
        # After a device error every CUDA call raises, and that error matters more than this one.
        with suppress(RuntimeError):
            torch.cuda.empty_cache()
