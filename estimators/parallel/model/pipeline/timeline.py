"""What a rank of a pipeline did, and when."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from ringspark.estimators.parallel.model.pipeline.actions import Action


class Timed(NamedTuple):
    """An action with its begin and end, in seconds of the host's monotonic clock, waits left out."""

    action: Action
    begin: float
    end: float


class Recorder:
    """Keeps the actions of a rank while it is on.

    Attributes:
        actions: What the rank did since it was switched on; None while it is off.
    """

    def __init__(self) -> None:
        self.actions: list[Timed] | None = None

    @contextmanager
    def span(self, action: Action) -> Iterator[None]:
        if self.actions is None:
            yield
            return
        begin = time.monotonic()
        yield
        self.actions.append(Timed(action, begin, time.monotonic()))


def bubble_share(ranks: Sequence[Sequence[Timed]]) -> float:
    """Returns the share of the ranks' time, from the first begin to the last end, in which they wait."""
    begin = min(timed.begin for rank in ranks for timed in rank)
    end = max(timed.end for rank in ranks for timed in rank)
    busy = sum(timed.end - timed.begin for rank in ranks for timed in rank)
    return 1 - busy / (len(ranks) * (end - begin))
