"""Times on a GPU or the CPU.

A call only queues work on the GPU, so the clock is read after the device has finished. Compared cases run in
interleaved rounds, so that a change of the GPU's clock rate affects all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median

import harness
import torch

from check.part import Setup

MIB = 2**20
# A round is long compared with the start of a kernel and the resolution of the clock.
_ROUND_SECONDS = 0.1
_MOST_CALLS = 500


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def seconds_of(call: Callable[[], object], device: str, count: int = 1) -> float:
    """Returns the seconds of one of `count` calls, to the end of their last kernel."""

    def repeat() -> None:
        for _ in range(count):
            call()
        synchronize(device)

    synchronize(device)
    return harness.seconds_of(repeat) / count


class Rounds(dict[str, list[float]]):
    """The seconds of one call of each case, per round."""

    def milliseconds(self, *names: str) -> list[float | None]:
        """Returns the median time of each case; None for a case that did not run."""
        return [1000 * median(self[name]) if name in self else None for name in names]

    def rate(self, name: str, rows: int) -> float:
        return median(rows / seconds for seconds in self[name])

    def ratio(self, name: str, reference: str) -> float:
        return harness.median_ratio(self[name], self[reference])


def compare(cases: Mapping[str, Callable[[], object]], setup: Setup) -> Rounds:
    """Times the cases in interleaved rounds, after warm-up calls that do not count."""
    timed = {
        name: partial(seconds_of, call, setup.device, _warm_up(call, setup)) for name, call in cases.items()
    }
    return Rounds(harness.measure_in_turns(timed, setup.rounds, warm_ups=0))


def _warm_up(call: Callable[[], object], setup: Setup) -> int:
    """Returns the number of calls per round."""
    # The first call allocates and chooses kernels; the second one fills torch's cache of memory.
    for _ in range(1 if setup.is_tiny else 3):
        call()
    wanted = math.ceil(_ROUND_SECONDS / max(seconds_of(call, setup.device), 1e-9))
    return 1 if setup.is_tiny else max(1, min(_MOST_CALLS, wanted))
