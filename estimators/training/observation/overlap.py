"""Measures how much of the communication of a step is hidden behind its computation.

As in Holistic Trace Analysis (`comm_comp_overlap`): the time in which a rank both computes and communicates
over the time in which it communicates. Both are unions of intervals, so what travels beside something else
counts once. The rank communicates from the call that begins an operation until its result is there, which
includes that it waits for a peer that is late. It computes in the forward and backward passes and in the
optimizer's step, except while it begins an operation in there or waits for one.

Only some steps are measured, and they stand for the others of their epoch, because on a measured step a
thread looks for the ends of operations. Measuring needs no exchange, and changes no number.

Nobody knows the share on a GPU, whose work goes on after the host's call has returned, where a library
sends by itself (sharding 'parameters', a parameter server, DiLoCo with a delay), and in a pipeline, whose
stages send to each other beside the operations that are noted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.operation_times import OperationTime
from ringspark.estimators.training.callbacks import TrainingState
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.observation.intervals import (
    Interval,
    difference,
    intersection,
    length,
    union,
)
from ringspark.estimators.training.observation.timeline import RareKind, StepKind, Timeline, now_ns

# Distance of the measured steps. A prime, so that whatever happens every few steps is seen as often as it is.
MEASURED_EVERY = 13

COMPUTING: frozenset[StepKind] = frozenset(("forward", "backward", "step"))
_NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True, kw_only=True)
class Communication:
    """What one rank measured over some steps.

    Attributes:
        taken: Steps that the rank took.
        measured: Those of them that were measured.
        total_ns: Time in which it communicated in the measured steps, in nanoseconds.
        hidden_ns: The part of it in which it computed too.
    """

    taken: int = 0
    measured: int = 0
    total_ns: int = 0
    hidden_ns: int = 0


def hidden_and_total(operations: Sequence[OperationTime], computing: Sequence[Interval]) -> tuple[int, int]:
    """Returns how long a rank communicated while it computed, and how long it communicated, in nanoseconds.

    Args:
        computing: Spans of computation, in which the rank may have waited for an operation.
    """
    communicated = union((o.begin_ns, o.end_ns) for o in operations)
    blocked = union(interval for operation in operations for interval in operation.blocked)
    computed = difference(union(computing), blocked)
    return length(intersection(communicated, computed)), length(communicated)


class Overlap(Protocol):
    """What the training loop tells about its steps, beside their spans."""

    def begin(self) -> None:
        """Begins an epoch, or the rest of one."""

    def step(self, number: int, num_steps: int) -> AbstractContextManager[None]:
        """Returns a context for the `number`-th of the epoch's `num_steps` steps, from 0."""

    def taken(self) -> Communication | None:
        """Returns what was measured since `begin`; None where nobody knows."""


class NoOverlap:
    """Measures nothing, and makes no object in a step."""

    def begin(self) -> None:
        return

    def step(self, number: int, num_steps: int) -> AbstractContextManager[None]:
        return _NOTHING

    def taken(self) -> Communication | None:
        return None


NO_OVERLAP = NoOverlap()


class StepOverlap:
    """Measures every n-th step of an epoch, and all steps that a timeline records.

    Where the ranks exchange now and then, every step is measured: one without an exchange costs nothing to
    measure, and one with it is not left to chance.

    Attributes:
        timeline: What the loop tells its spans to, in place of the timeline given.
    """

    def __init__(self, world: Collective, timeline: Timeline, *, is_pipeline: bool = False) -> None:
        """Stands before the first epoch.

        Args:
            is_pipeline: Whether stages send to each other beside what is noted: then no share is told.
        """
        self.timeline = _ComputingSpans(timeline)
        self._operations = world.operations
        self._is_pipeline = is_pipeline
        self.begin()

    def begin(self) -> None:
        self._taken = self._measured = self._total_ns = self._hidden_ns = 0

    def step(self, number: int, num_steps: int) -> AbstractContextManager[None]:
        self._taken += 1
        if not self._operations.sees_all:
            return _NOTHING
        every = MEASURED_EVERY if self._operations.in_every_step else 1
        # The second step of an epoch, if it has one: readers and libraries begin in the first one.
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
        # Not reached by a step that fails.
        hidden, total = hidden_and_total(operations, computing)
        self._measured += 1
        self._hidden_ns += hidden
        self._total_ns += total
        self.timeline.add_operations(operations)

    def taken(self) -> Communication | None:
        if self._is_pipeline or not self._measured:
            return None
        return Communication(
            taken=self._taken, measured=self._measured, total_ns=self._total_ns, hidden_ns=self._hidden_ns
        )


class _ComputingSpans:
    """A timeline that also notes the spans of computation, while a step is measured.

    Attributes:
        computing: The spans of the step that is measured; None between such steps.
    """

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
        return _noted(span, self.computing)

    def rare_span(self, kind: RareKind, state: TrainingState) -> AbstractContextManager[None]:
        return self._timeline.rare_span(kind, state)

    def add_operations(self, operations: Sequence[OperationTime]) -> None:
        self._timeline.add_operations(operations)

    def close(self) -> None:
        self._timeline.close()


@contextmanager
def _noted(span: AbstractContextManager[None], computing: list[Interval]) -> Iterator[None]:
    with span:
        begin = now_ns()
        yield
        computing.append((begin, now_ns()))
