"""Learning-rate schedules: pure functions (step, number of steps) -> factor on the learning rate.

Pure, so that a resumed training needs no scheduler state.
"""

from __future__ import annotations

import math
from collections.abc import Callable

Schedule = Callable[[int, int], float]

WARM_UP_SHARE = 0.3
START_FACTOR = 1 / 25
END_FACTOR = 1e-4


def _constant(step: int, num_steps: int) -> float:
    return 1.0


def _linear(step: int, num_steps: int) -> float:
    return 1.0 - step / max(1, num_steps)


def _cosine(step: int, num_steps: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * min(1.0, step / max(1, num_steps))))


def _one_cycle(step: int, num_steps: int) -> float:
    """Cosine up over the first 30 % of the steps, cosine down to almost zero (Smith 2018)."""
    peak = WARM_UP_SHARE * num_steps
    if step < peak:
        share, low = step / peak, START_FACTOR
        return low + (1 - low) * 0.5 * (1 - math.cos(math.pi * share))
    share = min(1.0, (step - peak) / max(1.0, num_steps - 1 - peak))
    return END_FACTOR + (1 - END_FACTOR) * 0.5 * (1 + math.cos(math.pi * share))


SCHEDULES: dict[str, Schedule] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "one_cycle": _one_cycle,
}
