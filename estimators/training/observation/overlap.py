"""Measures how much of a step's communication is hidden behind its computation.

The share is the time in which a rank computes and communicates, divided by the time in which it communicates,
as in Holistic Trace Analysis (`comm_comp_overlap`). While a rank starts an operation or waits for one, it
does not compute.

Intervals are half open, [begin, end), in nanoseconds. A set of intervals is sorted and disjoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.operation_times import OperationTime
from ringspark.estimators.training.callbacks import TrainingState
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.observation.timeline import RareKind, StepKind, Timeline, now_ns

# Distance between measured steps. A prime, so that periodic events are measured as often as they happen.
MEASURED_EVERY = 13

COMPUTING: frozenset[StepKind] = frozenset(("forward", "backward", "step"))
_NOTHING: AbstractContextManager[None] = nullcontext()

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the union of intervals, which may overlap and have any order."""
    merged: list[Interval] = []
    for begin, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def difference(left: Iterable[Interval], right: Iterable[Interval]) -> list[Interval]:
    """Returns the intervals of `left` without the intervals of `right`, both disjoint and sorted."""
    others = list(right)
    first = 0
    found = []
    for begin, end in left:
        # An interval that ends before this one begins also ends before all later ones.
        while first < len(others) and others[first][1] <= begin:
            first += 1
        number = first
        while begin < end and number < len(others) and others[number][0] < end:
            if begin < others[number][0]:
                found.append((begin, others[number][0]))
            begin = others[number][1]
            number += 1
        if begin < end:
            found.append((begin, end))
    return found


def length(intervals: Iterable[Interval]) -> int:
    return sum(end - begin for begin, end in intervals)


@dataclass(kw_only=True)
class Communication:
    """Communication time in the measured steps; in `hidden_ns` of it the rank also computed."""

    taken: int = 0
    measured: int = 0
    total_ns: int = 0
    hidden_ns: int = 0


def hidden_and_total(operations: Sequence[OperationTime], computing: Sequence[Interval]) -> tuple[int, int]:
    communicated = union((o.begin_ns, o.end_ns) for o in operations)
    blocked = union(interval for operation in operations for interval in operation.blocked)
    total = length(communicated)
    return total - length(difference(communicated, difference(union(computing), blocked))), total


class Overlap:
    """Receives the steps of the training loop. This class measures nothing, and makes no object per step."""

    def begin(self) -> None:
        """Starts an epoch, or the rest of one."""

    def step(self, number: int, num_steps: int) -> AbstractContextManager[None]:
        """Returns a context for step `number`, from 0, of the epoch's `num_steps`."""
        return _NOTHING

    def read(self) -> Communication | None:
        """Returns the measurements since `begin`; None if unknown."""
        return None


NO_OVERLAP = Overlap()


class StepOverlap(Overlap):
    """Measures every n-th step, or every step if only some steps communicate, as in local SGD."""

    def __init__(self, world: Collective, timeline: Timeline, *, is_pipeline: bool = False) -> None:
        self.timeline = _ComputingSpans(timeline)
        self._operations = world.operations
        self._is_pipeline = is_pipeline
        self.begin()

    def begin(self) -> None:
        self._found = Communication()

    def step(self, number: int, num_steps: int) -> AbstractContextManager[None]:
        self._found.taken += 1
        if not self._operations.sees_all:
            return _NOTHING
        every = MEASURED_EVERY if self._operations.in_every_step else 1
        # The second step of an epoch if it has one, because readers and libraries start up in the first.
        # No step of a pipeline, whose stages communicate outside the recorded operations.
        is_due = not self._is_pipeline and number % every == min(1, num_steps - 1, every - 1)
        return self._measure() if is_due or self.timeline.is_recording else _NOTHING

    @contextmanager
    def _measure(self) -> Iterator[None]:
        computing = self.timeline.computing = []
        self._operations.start()
        try:
            yield
        finally:
            operations = self._operations.take()
            self.timeline.computing = None
        # A step that fails is not counted.
        hidden, total = hidden_and_total(operations, computing)
        self._found.measured += 1
        self._found.hidden_ns += hidden
        self._found.total_ns += total
        self.timeline.add_operations(operations)

    def read(self) -> Communication | None:
        return self._found if self._found.measured and not self._is_pipeline else None


class _ComputingSpans(Timeline):
    """A timeline that adds the spans of computation to `computing`, unless it is None."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.computing: list[Interval] | None = None

    @property
    def is_recording(self) -> bool:
        return self._timeline.is_recording

    def steps(self, batches: Iterator[Batch], state: TrainingState) -> Iterator[Batch]:
        return self._timeline.steps(batches, state)

    def span(self, kind: StepKind) -> AbstractContextManager[None]:
        span = self._timeline.span(kind)
        if self.computing is None or kind not in COMPUTING:
            return span
        return _record_span(span, self.computing)

    def rare_span(self, kind: RareKind, state: TrainingState) -> AbstractContextManager[None]:
        return self._timeline.rare_span(kind, state)

    def add_operations(self, operations: Sequence[OperationTime]) -> None:
        self._timeline.add_operations(operations)

    def close(self) -> None:
        self._timeline.close()


@contextmanager
def _record_span(span: AbstractContextManager[None], computing: list[Interval]) -> Iterator[None]:
    with span:
        begin = now_ns()
        yield
        computing.append((begin, now_ns()))
