"""Times of a GPU's work by the clock of its host, from CUDA events, without waiting for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ringspark.estimators.training.observation.timeline import Clock
from ringspark.extras.timeline.span_file import Span

_NS_PER_MS = 1e6


@dataclass(kw_only=True)
class DeviceStep:
    """The events of one step on the stream that computes: one at its begin, and two for each span."""

    begin: torch.cuda.Event
    spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]]


class DeviceClock:
    """Puts events on the host's axis.

    CUDA tells the time between two events, in fp32 milliseconds, which is exact to a microsecond over
    seconds and to a millisecond over hours. So the time of each step's first event is counted from the step
    before it, and the first one's from an event for which the host waited.
    """

    def __init__(self, device: torch.device, clock: Clock) -> None:
        torch.cuda.synchronize(device)
        self._device = device
        self._last = self.mark()
        self._last_ns = float(clock())

    def mark(self) -> torch.cuda.Event:
        """Returns an event that happens once all work given to the device so far is done."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def spans_of(self, step: DeviceStep) -> list[Span] | None:
        """Returns the spans of a step by the host's clock, in order of steps; None if not all have ended."""
        events = [step.begin, *(end for _, _, end in step.spans)]
        if not all(event.query() for event in events):  # type: ignore[no-untyped-call]
            return None
        self._last_ns += self._last.elapsed_time(step.begin) * _NS_PER_MS
        self._last = step.begin
        return [(kind, self._at(begin), self._at(end)) for kind, begin, end in step.spans]

    def _at(self, event: torch.cuda.Event) -> int:
        milliseconds: float = self._last.elapsed_time(event)
        return round(self._last_ns + milliseconds * _NS_PER_MS)
