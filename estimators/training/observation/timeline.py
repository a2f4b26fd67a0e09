"""The interface through which the training loop reports the times of a step.

`exchange` lasts from the end of the backward pass until the reduced gradients have arrived; `backward`
includes starting to send gradient buckets, `checkpoint` only the copy of the state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

from ringspark.estimators.collectives.operation_times import Interval, OperationTime
from ringspark.estimators.training.callbacks import TrainingState
from ringspark.estimators.training.feed import Batch

StepKind = Literal["read", "transform", "forward", "backward", "exchange", "step"]
RareKind = Literal["checkpoint", "validation"]
COMPUTING: frozenset[StepKind] = frozenset(("forward", "backward", "step"))

# One object for all calls: a step that is not recorded makes none.
_NOTHING: AbstractContextManager[None] = nullcontext()


Clock = Callable[[], int]
"""Returns the time of a monotonic clock, in nanoseconds."""


def now_ns() -> int:
    return time.perf_counter_ns()


class Timeline:
    """Receives the spans of the training loop. This class records nothing, and makes no object per step.

    Attributes:
        computing: List that gets the times of computation; None while they are not needed.
    """

    computing: list[Interval] | None = None

    @property
    def is_recording(self) -> bool:
        return False

    def steps(self, batches: Iterator[Batch], state: TrainingState) -> Iterator[Batch]:
        """Yields an epoch's batches, and records when each is read and done."""
        return batches

    def span(self, kind: StepKind) -> AbstractContextManager[None]:
        """Returns a context for a part of a step."""
        span = self._span(kind)
        if self.computing is None or kind not in COMPUTING:
            return span
        return _record_span(span, self.computing)

    def _span(self, kind: StepKind) -> AbstractContextManager[None]:
        return _NOTHING

    def rare_span(self, kind: RareKind, state: TrainingState) -> AbstractContextManager[None]:
        """Returns a context for a span that is always recorded."""
        return _NOTHING

    def add_operations(self, operations: Sequence[OperationTime]) -> None:
        """Keeps the collective operations of the present step, if it is recorded."""

    def close(self) -> None:
        """Writes the last records."""


NO_TIMELINE = Timeline()


@contextmanager
def _record_span(span: AbstractContextManager[None], computing: list[Interval]) -> Iterator[None]:
    with span:
        begin = now_ns()
        yield
        computing.append((begin, now_ns()))
