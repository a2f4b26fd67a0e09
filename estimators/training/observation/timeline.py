"""The interface through which the training loop reports the times of a step.

`exchange` lasts from the end of the backward pass until the reduced gradients have arrived; `backward`
includes starting to send gradient buckets, `checkpoint` only the copy of the state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

from ringspark.estimators.collectives.operation_times import OperationTime
from ringspark.estimators.training.callbacks import TrainingState
from ringspark.estimators.training.feed import Batch

StepKind = Literal["read", "transform", "forward", "backward", "exchange", "step"]
RareKind = Literal["checkpoint", "validation"]

# One object for all calls: a step that is not recorded makes none.
_NOTHING: AbstractContextManager[None] = nullcontext()


Clock = Callable[[], int]
"""Returns the time of a monotonic clock, in nanoseconds."""


def now_ns() -> int:
    return time.perf_counter_ns()


class Timeline:
    """Receives the spans of the training loop. This class records nothing, and makes no object per step."""

    @property
    def is_recording(self) -> bool:
        return False

    def steps(self, batches: Iterator[Batch], state: TrainingState) -> Iterator[Batch]:
        """Yields an epoch's batches, and records when each is read and done."""
        return batches

    def span(self, kind: StepKind) -> AbstractContextManager[None]:
        """Returns a context for a part of a step."""
        return _NOTHING

    def rare_span(self, kind: RareKind, state: TrainingState) -> AbstractContextManager[None]:
        """Returns a context for a span that is always recorded."""
        return _NOTHING

    def add_operations(self, operations: Sequence[OperationTime]) -> None:
        """Keeps the collective operations of the present step, if it is recorded."""

    def close(self) -> None:
        """Writes the last records."""


NO_TIMELINE = Timeline()
