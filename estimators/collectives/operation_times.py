"""Records when a rank's operations were ready, started and done, in the steps for which it is enabled.

Libraries only answer whether an operation has ended, so a thread polls them. The thread holds references to
operations until `drop` releases them, before the rank leaves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

T = TypeVar("T")
S = TypeVar("S", bound=Any)  # a collective
P = ParamSpec("P")
Interval = tuple[int, int]
"""Begin and end, in nanoseconds of `time.perf_counter_ns`."""

# Seconds between two polls; a poll takes some microseconds of a core.
LOOK_SECONDS = 200e-6

_NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True, kw_only=True)
class AsyncOperation(Generic[T]):
    """An asynchronous operation of a library; any thread may call `is_done`, which does not block."""

    wait: Callable[[], T]
    is_done: Callable[[], bool]


@dataclass(frozen=True, kw_only=True)
class OperationTime:
    """One operation of one rank; all times in nanoseconds of `time.perf_counter_ns`.

    Attributes:
        name: Name in `Collective.start_sum`, or the type of the operation.
        ready_ns: Time at which its data was ready.
        blocked: Intervals in which the rank did nothing but start this operation or wait for it.
    """

    name: str
    ready_ns: int
    begin_ns: int
    end_ns: int
    blocked: tuple[Interval, ...]


class OperationTimes:
    """The operations of one rank; call `start` before a step and `take` after it.

    Attributes:
        sees_all: Whether every communication of a step is a call of this collective that ends within the
            step. A strategy sets it to False if another library also sends, or if all-reduces end in a later
            step.
        in_every_step: Whether the ranks communicate in every step, unlike local SGD.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.sees_all = True
        self.in_every_step = True
        self._operations: list[_Operation] = []
        self._ready: dict[str, int] = {}
        self._watcher = _Watcher()

    def start(self) -> None:
        self._operations, self._ready = [], {}
        self.is_on = True

    def take(self) -> tuple[OperationTime, ...]:
        self.is_on = False
        now, record = time.perf_counter_ns(), self._operations
        self._operations = []
        return tuple(operation.time(now) for operation in record)

    def ready(self, name: str) -> None:
        """Records that the data of the operation `name` is ready, before it starts."""
        if self.is_on:
            self._ready.setdefault(name, time.perf_counter_ns())

    def record_blocking(self, name: str, ready_ns: int | None = None) -> AbstractContextManager[None]:
        return self._begin(name, ready_ns).waiting() if self.is_on else _NOTHING

    def record_when_waited(self, name: str, run: Callable[[], T]) -> Callable[[], T]:
        """Returns a function that calls `run`, a blocking operation, and records its times."""
        if not self.is_on:
            return run
        ready_ns = self._ready.pop(name, time.perf_counter_ns())

        def record() -> T:
            with self.record_blocking(name, ready_ns):
                return run()

        return record

    def record_async(self, name: str, begin: Callable[[], AsyncOperation[T]]) -> Callable[[], T]:
        if not self.is_on:
            return begin().wait
        operation = self._begin(name)
        with operation.occupied():
            started = begin()
            self._watcher.watch(operation, started.is_done)

        def record() -> T:
            with operation.waiting():
                return started.wait()

        return record

    def drop(self) -> None:
        """Drops references to operations in flight; called before the rank leaves."""
        self.is_on = False
        self._watcher.close()

    def _begin(self, name: str, ready_ns: int | None = None) -> _Operation:
        now = time.perf_counter_ns()
        if ready_ns is None:
            ready_ns = self._ready.pop(name, now)
        self._operations.append(operation := _Operation(name, ready_ns, now))
        return operation


def record(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorates a blocking method of a collective; the operation has the method's name."""
    name = method.__name__

    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.operations.record_blocking(name):
            return method(self, *args, **kwargs)

    call.__name__, call.__doc__ = name, method.__doc__
    return call


class _Operation:
    def __init__(self, name: str, ready_ns: int, begin_ns: int) -> None:
        self._name = name
        self._ready_ns = ready_ns
        self._begin_ns = begin_ns
        self._blocked: list[Interval] = []
        self.end_ns: int | None = None

    def end(self) -> None:
        if self.end_ns is None:
            self.end_ns = time.perf_counter_ns()

    @contextmanager
    def occupied(self) -> Iterator[None]:
        begin = time.perf_counter_ns()
        yield
        self._blocked.append((begin, time.perf_counter_ns()))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        with self.occupied():
            yield
            self.end()

    def time(self, now_ns: int) -> OperationTime:
        end = self.end_ns
        return OperationTime(
            name=self._name,
            ready_ns=self._ready_ns,
            begin_ns=self._begin_ns,
            end_ns=now_ns if end is None else min(end, now_ns),
            blocked=tuple(self._blocked),
        )


class _Watcher:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in_flight: list[tuple[_Operation, Callable[[], bool]]] = []
        self._thread: threading.Thread | None = None

    def watch(self, operation: _Operation, is_done: Callable[[], bool]) -> None:
        with self._lock:
            self._in_flight.append((operation, is_done))
            if self._thread is None:
                # A daemon thread, which does not delay the end of the process.
                self._thread = threading.Thread(target=self._poll, name="ringspark-operations", daemon=True)
                self._thread.start()

    def close(self) -> None:
        with self._lock:
            self._in_flight.clear()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _poll(self) -> None:
        while True:
            with self._lock:
                self._in_flight[:] = [pair for pair in self._in_flight if not _is_over(*pair)]
                if not self._in_flight:
                    self._thread = None
                    return
            time.sleep(LOOK_SECONDS)


def _is_over(operation: _Operation, is_done: Callable[[], bool]) -> bool:
    if operation.end_ns is not None:
        return True
    # The rank may have waited for it meanwhile, which releases it and records its end.
    with suppress(RuntimeError, ValueError):
        if not is_done():
            return False
        operation.end()
    return True
