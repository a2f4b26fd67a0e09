"""Runs an iterator ahead of its consumer in one thread.

The thread never outlives the iterator. It ends when the source ends or fails, or when the consumer closes the
iterator. A source may use such iterators itself. Code that waits in a thread must poll `closed_check()`, so
that closing the outermost iterator also ends the iterators inside its source.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, nullcontext
from typing import NamedTuple, TypeVar

T = TypeVar("T")

_POLL_SECONDS = 0.05

_thread = threading.local()


class Closed(BaseException):
    """Ends a wait because the consumer has closed the iterator.

    It is not an Exception, because Exceptions lead to retries.
    """


def closed_check() -> Callable[[], bool] | None:
    """Returns a prefetching thread's check whether its consumer has closed the iterator; else None."""
    check: Callable[[], bool] | None = getattr(_thread, "closed", None)
    return check


class _End(NamedTuple):
    error: BaseException | None


def prefetch(source: Iterator[T], depth: int) -> Generator[T, None, None]:
    """Yields the items of `source`, with up to `depth` items computed in advance.

    A thread runs the source from the first item on. If the source is a generator, the thread also closes it.
    """
    assert depth >= 1, depth
    items: queue.Queue[T | _End] = queue.Queue(maxsize=depth)
    stopped = threading.Event()
    outer = closed_check()

    def closed() -> bool:
        return stopped.is_set() or (outer is not None and outer())

    def put(item: T | _End) -> bool:
        while not closed():
            try:
                items.put(item, timeout=_POLL_SECONDS)
                return True
            except queue.Full:
                continue
        return False

    def get() -> T | _End:
        while True:
            try:
                return items.get(timeout=None if outer is None else _POLL_SECONDS)
            except queue.Empty:
                if closed():
                    raise Closed from None

    def run() -> None:
        _thread.closed = closed
        last: BaseException | None = None
        try:
            # Closed in this thread, because a generator cannot be closed while another thread runs it.
            with closing(source) if isinstance(source, Generator) else nullcontext():
                for item in source:
                    if not put(item):
                        break
        except BaseException as error:
            last = error
        put(_End(last))

    thread = threading.Thread(target=run, name="ringspark-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item = get()
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            yield item
    finally:
        stopped.set()
        thread.join()


def prefetch_bundles(
    source: Generator[T, None, None], depth: int, size: Callable[[T], int], least: int
) -> Generator[T, None, None]:
    """Like `prefetch`, but hands over bundles of items; each but the last has a total `size` >= `least`."""
    with closing(prefetch(_bundles(source, size, least), depth)) as bundles:
        for bundle in bundles:
            yield from bundle


def _bundles(
    source: Generator[T, None, None], size: Callable[[T], int], least: int
) -> Generator[list[T], None, None]:
    bundle: list[T] = []
    total = 0
    with closing(source):
        try:
            for item in source:
                bundle.append(item)
                total += size(item)
                if total >= least:
                    yield bundle
                    bundle, total = [], 0
        except Exception:
            yield bundle  # the consumer gets the earlier items before the error
            raise
    yield bundle
