"""Records a rank's timeline: a span for each part of a step, and the collective operations.

On a GPU the host only queues work, so most spans also have times measured by the GPU. If a file would hold
more than `MOST_SPANS` spans, every second recorded step is dropped and the recording interval doubles. A file
therefore covers the whole training evenly.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.operation_times import OperationTime
from ringspark.estimators.training.callbacks import TrainingState
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.observation.background_file import BackgroundFile
from ringspark.estimators.training.observation.timeline import Clock, RareKind, StepKind, Timeline, now_ns
from ringspark.extras.timeline.clocks import measure_offset
from ringspark.extras.timeline.span_file import (
    RankSpans,
    RareSpan,
    Span,
    StepSpans,
    span_file_uri,
    start_number,
)

MOST_SPANS = 20_000
MOST_SPANS_OF_A_STEP = 2_000
MOST_RARE_SPANS = 2_000
MOST_OFFSETS = 1_000
# Rounds of the clock comparison at the start of later epochs.
_LATER_ROUNDS = 4
# Smallest interval between two writes of the file.
WRITE_SECONDS = 10.0
# Largest share of processor time for the writes; a large file is written less often.
WRITE_SHARE = 0.001

_NS_PER_MS = 1e6
_ON_DEVICE = frozenset(("transform", "forward", "backward", "exchange", "step"))
# One object for all calls of steps that are not recorded.
_NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass(kw_only=True)
class DeviceStep:
    """CUDA events of one step, on the compute stream: one at the start of the step, and two per span."""

    mark: Callable[[], torch.cuda.Event]
    begin: torch.cuda.Event
    spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)


class DeviceClock:
    """Converts times of CUDA events to the host's clock.

    CUDA returns the time between two events as fp32 milliseconds. This time is exact only if the events
    are at most a few seconds apart, so each step is timed from the previous step. The first step is timed
    from an event for which the host's time is known.
    """

    def __init__(self, device: torch.device, clock: Clock) -> None:
        torch.cuda.synchronize(device)
        self._device = device
        self._last = self.mark()
        self._last_ns = float(clock())

    def mark(self) -> torch.cuda.Event:
        """Records an event that follows all work queued so far."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def read_spans(self, step: DeviceStep) -> list[Span] | None:
        """Returns the spans of the next step on the host's clock; None if a span has not ended yet."""
        events = [step.begin, *(end for _, _, end in step.spans)]
        if not all(event.query() for event in events):  # type: ignore[no-untyped-call]
            return None
        self._last_ns += self._last.elapsed_time(step.begin) * _NS_PER_MS
        self._last = step.begin
        return [(kind, self._at(begin), self._at(end)) for kind, begin, end in step.spans]

    def _at(self, event: torch.cuda.Event) -> int:
        milliseconds: float = self._last.elapsed_time(event)
        return round(self._last_ns + milliseconds * _NS_PER_MS)


class RankTimeline(Timeline):
    """Writes a file with every `every`-th step of this rank, and with its newest checkpoints and validations.

    The constructor compares the ranks' clocks, so every rank must call it.
    """

    def __init__(
        self, every: int, world: Collective, run_uri: str, device: torch.device, clock: Clock = now_ns
    ) -> None:
        self._every, self._world, self._clock = every, world, clock
        self._device_clock = DeviceClock(device, clock) if device.type == "cuda" else None
        offset, self._moment = measure_offset(world, clock)
        self._offsets = [offset]
        uri = span_file_uri(run_uri, world.rank, start_number(self._moment))
        self._file = BackgroundFile(uri, f"timeline of rank {world.rank}")
        self._open: StepSpans | None = None
        self._open_device: DeviceStep | None = None
        self._steps: list[StepSpans] = []
        self._num_spans = 0
        self._pending: deque[tuple[StepSpans, DeviceStep]] = deque()
        self._rare: deque[RareSpan] = deque(maxlen=MOST_RARE_SPANS)
        self._taken_steps = 0
        self._left_out = 0
        self._written_ns = clock()

    def steps(self, batches: Iterator[Batch], state: TrainingState) -> Iterator[Batch]:
        self._compare_clocks()
        while True:
            self._begin(state)
            with self.span("read"):
                batch = next(batches, None)
            if batch is None:
                self._open = None
                self._write_if_due()
                return
            if self._open is not None:
                self._open.rows = batch.num_rows
            yield batch
            self._taken_steps += 1
            if self._open is not None:
                self._end(self._open)

    def _span(self, kind: StepKind) -> AbstractContextManager[None]:
        step = self._open
        if step is None:
            return _NOTHING
        if len(step.spans) >= MOST_SPANS_OF_A_STEP:
            self._left_out += 1
            return _NOTHING
        return _StepSpan(kind, step, self._clock, self._open_device if kind in _ON_DEVICE else None)

    @contextmanager
    def rare_span(self, kind: RareKind, state: TrainingState) -> Iterator[None]:
        begin = self._clock()
        try:
            yield
        finally:
            times = {"begin_ns": begin, "end_ns": self._clock()}
            self._rare.append(RareSpan(kind=kind, epoch=state.epoch, step=state.step, **times))

    @property
    def is_recording(self) -> bool:
        return self._open is not None

    def add_operations(self, operations: Sequence[OperationTime]) -> None:
        if self._open is None:
            return
        kept = operations[:MOST_SPANS_OF_A_STEP]
        self._left_out += len(operations) - len(kept)
        self._open.operations = [(o.name, o.ready_ns, o.begin_ns, o.end_ns) for o in kept]

    def close(self) -> None:
        self._open = None
        if self._device_clock is not None:
            self._take_device_times()
        self._file.close(self._content())

    def _compare_clocks(self) -> None:
        """Measures the clock offset again, because clocks drift. Every rank calls this in each epoch."""
        if self._taken_steps:
            self._offsets.append(measure_offset(self._world, self._clock, _LATER_ROUNDS)[0])
        if len(self._offsets) > MOST_OFFSETS:
            del self._offsets[1::2]

    def _begin(self, state: TrainingState) -> None:
        self._open = None
        if (state.step + 1) % self._every:
            return
        self._open = StepSpans(epoch=state.epoch, step=state.step + 1, begin_ns=self._clock())
        if self._device_clock is not None:
            mark = self._device_clock.mark
            self._open_device = DeviceStep(mark=mark, begin=mark())

    def _end(self, step: StepSpans) -> None:
        self._open = None
        step.end_ns = self._clock()
        if self._open_device is None:
            self._keep(step)
        else:
            self._pending.append((step, self._open_device))
            self._take_device_times()
        self._write_if_due()

    def _take_device_times(self) -> None:
        assert self._device_clock is not None
        while self._pending:
            done, device = self._pending[0]
            spans = self._device_clock.read_spans(device)
            if spans is None:
                return
            self._pending.popleft()
            done.device_spans = spans
            self._keep(done)

    def _keep(self, step: StepSpans) -> None:
        self._steps.append(step)
        self._num_spans += _num_spans(step)
        while self._num_spans > MOST_SPANS and len(self._steps) > 1:
            self._every *= 2
            self._steps = [kept for kept in self._steps if kept.step % self._every == 0]
            self._num_spans = sum(map(_num_spans, self._steps))

    def _write_if_due(self) -> None:
        pause = max(WRITE_SECONDS, self._file.cpu_seconds / WRITE_SHARE)
        if self._clock() - self._written_ns < pause * 1e9 or self._file.is_busy:
            return
        self._written_ns = self._clock()
        self._file.write(self._content())

    def _content(self) -> Callable[[], bytes]:
        return RankSpans(
            rank=self._world.rank,
            size=self._world.size,
            host=f"{socket.gethostname()} ({self._world.member.host})",
            every=self._every,
            taken_steps=self._taken_steps,
            left_out=self._left_out,
            moment=self._moment,
            offsets=tuple(self._offsets),
            steps=tuple(self._steps),
            rare=tuple(self._rare),
        ).to_json


def _num_spans(step: StepSpans) -> int:
    return len(step.spans) + len(step.device_spans) + len(step.operations)


class _StepSpan:
    """Context that adds a span to a step. It is a class, because a generator would be slower."""

    __slots__ = ("_begin", "_clock", "_device", "_kind", "_mark", "_step")

    def __init__(self, kind: StepKind, step: StepSpans, clock: Clock, device: DeviceStep | None) -> None:
        self._kind, self._step, self._clock, self._device = kind, step, clock, device
        self._mark: Any = None

    def __enter__(self) -> None:
        if self._device is not None:
            self._mark = self._device.mark()
        self._begin = self._clock()

    def __exit__(self, *_: object) -> None:
        self._step.spans.append((self._kind, self._begin, self._clock()))
        if self._device is not None:
            self._device.spans.append((self._kind, self._mark, self._device.mark()))
