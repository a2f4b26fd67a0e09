"""Notes when a rank's operations were ready, begun and done, on the steps for which somebody asks.

Whoever asks calls `start`, and `take` after the step. Between steps, and where nobody asks, nothing is noted
and no object is made.

The libraries tell nobody when an operation ends that they carry out beside the rank's own work; they only
answer whether it has ended. So on a step that is noted a thread looks, a few times in a millisecond, for as
long as an operation is under way. It holds what it looks at, so it drops everything before the rank leaves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Concatenate, Generic, ParamSpec, Protocol, TypeVar

T = TypeVar("T")
P = ParamSpec("P")
Interval = tuple[int, int]
"""Begin and end, in nanoseconds of `time.perf_counter_ns`."""

# Seconds between two looks at the operations under way; a look takes some microseconds of a core.
LOOK_SECONDS = 200e-6

_NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True, kw_only=True)
class Started(Generic[T]):
    """An operation that a library carries out beside the rank's own work.

    Attributes:
        wait: Waits for it, and returns its result.
        is_done: Answers at once whether it has ended, well or not; from any thread.
    """

    wait: Callable[[], T]
    is_done: Callable[[], bool]


@dataclass(frozen=True, kw_only=True)
class OperationTime:
    """One operation of one rank; all times in nanoseconds of `time.perf_counter_ns`.

    Attributes:
        name: Name of the sum as in `Collective.start_sum`, or the kind of the operation.
        ready_ns: Time at which its data was there.
        begin_ns: Time at which it was given to the library, or began by itself.
        end_ns: Time at which its result was there; the time of `take` if it was not there yet.
        blocked: When the rank itself did nothing but begin it or wait for it.
    """

    name: str
    ready_ns: int
    begin_ns: int
    end_ns: int
    blocked: tuple[Interval, ...]


class OperationTimes:
    """The operations of one rank.

    Attributes:
        is_on: Whether operations are noted now.
        sees_all: Whether all that the ranks exchange in a step is a call of this collective that ends within
            the step. A strategy whose library sends by itself, or whose sums take longer, says no.
        in_every_step: Whether the ranks exchange in every step, not now and then as in local training.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.sees_all = True
        self.in_every_step = True
        self._noted: list[_Operation] = []
        self._ready: dict[str, int] = {}
        self._watcher = _Watcher()

    def start(self) -> None:
        """Notes the operations from now on."""
        self._noted, self._ready = [], {}
        self.is_on = True

    def take(self) -> tuple[OperationTime, ...]:
        """Ends the notes, and returns them in the order in which the operations began."""
        self.is_on = False
        now, noted = time.perf_counter_ns(), self._noted
        self._noted = []
        return tuple(operation.time(now) for operation in noted)

    def ready(self, name: str) -> None:
        """Notes that the data of the operation `name` is there, before it begins."""
        if self.is_on:
            self._ready.setdefault(name, time.perf_counter_ns())

    def blocking(self, name: str, ready_ns: int | None = None) -> AbstractContextManager[None]:
        """Returns a context for an operation for which the rank waits from its begin to its end."""
        return self._begin(name, ready_ns).waiting() if self.is_on else _NOTHING

    def when_waited(self, name: str, run: Callable[[], T]) -> Callable[[], T]:
        """Returns `run`, an operation that only takes place when it is called."""
        if not self.is_on:
            return run
        ready_ns = self._ready.pop(name, time.perf_counter_ns())

        def noted() -> T:
            with self.blocking(name, ready_ns):
                return run()

        return noted

    def beside(self, name: str, begin: Callable[[], Started[T]]) -> Callable[[], T]:
        """Begins an operation; returns what waits for it."""
        if not self.is_on:
            return begin().wait
        operation = self._begin(name)
        with operation.occupied():
            started = begin()
            self._watcher.watch(operation, started.is_done)

        def noted() -> T:
            with operation.waiting():
                return started.wait()

        return noted

    def drop(self) -> None:
        """Forgets what is under way, so that nothing of it is held; called before the rank leaves."""
        self.is_on = False
        self._watcher.close()

    def _begin(self, name: str, ready_ns: int | None = None) -> _Operation:
        now = time.perf_counter_ns()
        if ready_ns is None:
            ready_ns = self._ready.pop(name, now)
        self._noted.append(operation := _Operation(name, ready_ns, now))
        return operation


class _HasOperations(Protocol):
    operations: OperationTimes


S = TypeVar("S", bound=_HasOperations)


def noted(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorates a method of a collective that blocks: the operation goes by its name."""
    name = method.__name__

    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.operations.blocking(name):
            return method(self, *args, **kwargs)

    call.__name__, call.__doc__ = name, method.__doc__
    return call


class _Operation:
    """An operation that may be under way."""

    def __init__(self, name: str, ready_ns: int, begin_ns: int) -> None:
        self._name = name
        self._ready_ns = ready_ns
        self._begin_ns = begin_ns
        self._blocked: list[Interval] = []
        self.end_ns: int | None = None

    def end(self) -> None:
        """Notes the end, unless somebody has noticed it before."""
        if self.end_ns is None:
            self.end_ns = time.perf_counter_ns()

    @contextmanager
    def occupied(self) -> Iterator[None]:
        """A context in which the rank does nothing else."""
        begin = time.perf_counter_ns()
        yield
        self._blocked.append((begin, time.perf_counter_ns()))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A context in which the rank waits for the end."""
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
    """Notes the ends of operations in a thread that lives while some are under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: list[tuple[_Operation, Callable[[], bool]]] = []
        self._thread: threading.Thread | None = None

    def watch(self, operation: _Operation, is_done: Callable[[], bool]) -> None:
        with self._lock:
            self._under_way.append((operation, is_done))
            if self._thread is None:
                # Daemon: it waits for nobody at the end of the process.
                self._thread = threading.Thread(target=self._look, name="ringspark-operations", daemon=True)
                self._thread.start()

    def close(self) -> None:
        with self._lock:
            self._under_way.clear()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _look(self) -> None:
        while True:
            with self._lock:
                self._under_way[:] = [pair for pair in self._under_way if not _is_over(*pair)]
                if not self._under_way:
                    self._thread = None
                    return
            time.sleep(LOOK_SECONDS)


def _is_over(operation: _Operation, is_done: Callable[[], bool]) -> bool:
    """Notes the end of an operation if it has ended; returns whether there is nothing left to look for."""
    if operation.end_ns is not None:
        return True
    # Who waits for it may have taken it from the library meanwhile, and notes its end.
    with suppress(RuntimeError, ValueError):
        if not is_done():
            return False
        operation.end()
    return True
