"""Times of a GPU's work by the host's clock, from CUDA events, without synchronization."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ringspark.estimators.training.observation.timeline import Clock
from ringspark.extras.timeline.span_file import Span

_NS_PER_MS = 1e6


@dataclass(kw_only=True)
class DeviceStep:
    """CUDA events of one step on the compute stream: one at the step's begin, and two per span."""

    begin: torch.cuda.Event
    spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]]


class DeviceClock:
    """Converts times of CUDA events to the host's clock.

    CUDA returns the time between two events in fp32 milliseconds, which is exact to a microsecond over
    seconds, but only to a millisecond over hours. So each step's time is relative to the previous step, and
    the first step's to an event that was synchronized.
    """

    def __init__(self, device: torch.device, clock: Clock) -> None:
        torch.cuda.synchronize(device)
        self._device = device
        self._last = self.mark()
        self._last_ns = float(clock())

    def mark(self) -> torch.cuda.Event:
        """Records an event after all work queued so far."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def read_spans(self, step: DeviceStep) -> list[Span] | None:
        """Returns the spans of the next step by the host's clock; None if some have not ended."""
        events = [step.begin, *(end for _, _, end in step.spans)]
        if not all(event.query() for event in events):  # type: ignore[no-untyped-call]
            return None
        self._last_ns += self._last.elapsed_time(step.begin) * _NS_PER_MS
        self._last = step.begin
        return [(kind, self._at(begin), self._at(end)) for kind, begin, end in step.spans]

    def _at(self, event: torch.cuda.Event) -> int:
        milliseconds: float = self._last.elapsed_time(event)
        return round(self._last_ns + milliseconds * _NS_PER_MS)
