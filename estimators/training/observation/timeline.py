"""The protocol through which the training loop reports where the time of its steps goes.

Kinds of spans, each named where the loop runs it:

- `read`: the loop waits for the reader's next batch.
- `transform`: the user's `transformBatch`.
- `forward`, `backward`: one each per micro-batch. If gradients travel in buckets (a large network over
  the network, or sharding), the sends begin inside of `backward`, whose span then includes the calls that
  begin them; sharding 'gradients' and 'parameters' also wait for earlier buckets in there.
- `exchange`: from the end of the backward pass until the reduced gradients have arrived. It does not include
  communication during the backward pass: it is the part that the step had to wait for. Row weights
  add a second one, before the forward pass, for the sum of the weights.
- `step`: clipping, the optimizer's step, under sharding the all-gather of the new weights, the moving
  average.
- `checkpoint`: the pause for copying the state; a thread writes it during the training.
- `validation`: the held-out rows after an epoch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

from ringspark.estimators.collectives.operation_times import OperationTime
from ringspark.estimators.training.callbacks import TrainingState
from ringspark.estimators.training.feed import Batch

# Import path of the implementation that records, with the arguments of `RankTimeline`.
RANK_TIMELINE = "ringspark.extras.timeline.rank_timeline:RankTimeline"

StepKind = Literal["read", "transform", "forward", "backward", "exchange", "step"]
RareKind = Literal["checkpoint", "validation"]

# One object for all calls: a step that is not recorded makes none.
_NOTHING: AbstractContextManager[None] = nullcontext()


Clock = Callable[[], int]
"""Returns nanoseconds that never go back, from any start."""


def now_ns() -> int:
    """Returns the time by the clock of every rank, in nanoseconds."""
    return time.perf_counter_ns()


class Timeline(Protocol):
    """What the training loop tells about its time."""

    @property
    def is_recording(self) -> bool:
        """Whether the present step is recorded."""

    def steps(self, batches: Iterator[Batch], state: TrainingState) -> Iterator[Batch]:
        """Yields the batches of an epoch's steps, and sees when each is read and done. Runs on every rank."""

    def span(self, kind: StepKind) -> AbstractContextManager[None]:
        """Returns a context for a part of a step."""

    def rare_span(self, kind: RareKind, state: TrainingState) -> AbstractContextManager[None]:
        """Returns a context for what is recorded whenever it happens."""

    def add_operations(self, operations: Sequence[OperationTime]) -> None:
        """Keeps the collective operations of the present step, if it is recorded."""

    def close(self) -> None:
        """Writes what was recorded last."""


class NoTimeline:
    """Records nothing, and makes no object in a step."""

    is_recording = False

    def steps(self, batches: Iterator[Batch], state: TrainingState) -> Iterator[Batch]:
        return batches

    def span(self, kind: StepKind) -> AbstractContextManager[None]:
        return _NOTHING

    def rare_span(self, kind: RareKind, state: TrainingState) -> AbstractContextManager[None]:
        return _NOTHING

    def add_operations(self, operations: Sequence[OperationTime]) -> None:
        return

    def close(self) -> None:
        return


NO_TIMELINE = NoTimeline()
