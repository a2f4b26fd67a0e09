"""Measures how much of a step's communication is hidden behind its computation.

The share is the time in which a rank computes and communicates, divided by the time in which it communicates,
as in Holistic Trace Analysis (`comm_comp_overlap`). While a rank starts an operation or waits for one, it
does not compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import numpy.typing as npt

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.operation_times import Interval, OperationTime
from ringspark.estimators.training.observation.timeline import Timeline

# Distance between measured steps. A prime, so that periodic events are measured as often as they happen.
MEASURED_EVERY = 13

_NOTHING: AbstractContextManager[None] = nullcontext()


def hidden_and_total(operations: Sequence[OperationTime], computing: Sequence[Interval]) -> tuple[int, int]:
    """Returns how long computation hides communication, and how long there is communication."""
    communicating = [(operation.begin_ns, operation.end_ns) for operation in operations]
    blocked = [interval for operation in operations for interval in operation.blocked]
    times = np.unique(np.array([*communicating, *blocked, *computing], dtype=np.int64))

    def covers(intervals: Sequence[Interval]) -> npt.NDArray[np.bool_]:
        """Returns whether any of the intervals covers the time between two neighbours in `times`."""
        begins, ends = np.sort(np.array(intervals, dtype=np.int64).reshape(-1, 2), axis=0).T
        return np.searchsorted(begins, times[:-1], "right") > np.searchsorted(ends, times[:-1], "right")

    lengths, communicates = np.diff(times), covers(communicating)
    hidden = communicates & covers(computing) & ~covers(blocked)
    return int(lengths[hidden].sum()), int(lengths[communicates].sum())


class StepOverlap:
    """Measures every n-th step, or every step if only some steps communicate, as in local SGD."""

    def __init__(self, world: Collective, timeline: Timeline, *, is_pipeline: bool = False) -> None:
        self._timeline, self._operations = timeline, world.operations
        self._is_pipeline = is_pipeline
        self.begin()

    def begin(self) -> None:
        """Starts an epoch, or the rest of one."""
        self.num_steps = self.num_measured = self._total_ns = self._hidden_ns = 0

    def step(self, number: int, num_steps: int) -> AbstractContextManager[None]:
        """Returns a context for step `number`, from 0, of the epoch's `num_steps`."""
        self.num_steps += 1
        if not self._operations.sees_all:
            return _NOTHING
        every = MEASURED_EVERY if self._operations.in_every_step else 1
        # The second step of an epoch if it has one, because readers and libraries start up in the first.
        # No step of a pipeline, whose stages communicate outside the recorded operations.
        is_due = not self._is_pipeline and number % every == min(1, num_steps - 1, every - 1)
        return self._measure() if is_due or self._timeline.is_recording else _NOTHING

    @contextmanager
    def _measure(self) -> Iterator[None]:
        computing = self._timeline.computing = []
        self._operations.start()
        try:
            yield
        finally:
            operations = self._operations.take()
            self._timeline.computing = None
        # A step that fails is not counted.
        hidden, total = hidden_and_total(operations, computing)
        self.num_measured += 1
        self._hidden_ns += hidden
        self._total_ns += total
        self._timeline.add_operations(operations)

    def read(self) -> tuple[int, int] | None:
        """Returns the time of communication since `begin`, and its hidden part, in ns; None if unknown."""
        if self._is_pipeline or not self.num_measured:
            return None
        # Scaled from the measured steps to all steps.
        steps, measured = self.num_steps, self.num_measured
        return self._total_ns * steps // measured, self._hidden_ns * steps // measured
