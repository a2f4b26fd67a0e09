"""Schedules without a flush: a step's last backward passes run in the next step, so no rank waits for them.

Gradients are applied late. Let f_t be the mean loss of step t's rows, w_t the weights after t steps, and d
the delay of the stage. The stage updates its weights by

    w_{t+1} = w_t - rate * gradient of f_{t-d} at w_{t-d}

- `2bw` (Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training"): d = 1 on every stage. No
  rank waits if a step has at least p - 1 micro-batches, where p is the number of stages.
- `pipedream` (Narayanan et al. 2019, "PipeDream", weight stashing): each stage has the smallest possible
  delay. With m micro-batches per step, stage s has d = ceil((p - 1 - s) / m).

A stage keeps d + 1 versions of its weights. During a step it keeps one more, which the step's own passes use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from ringspark.extras.model_parallel.pipeline.actions import Action, PassType
from ringspark.extras.model_parallel.pipeline.orders import Orders


@dataclass(frozen=True, kw_only=True)
class DelayedStep:
    """One training step of all pipeline stages.

    Attributes:
        orders: Actions of each stage, in order.
        micros: Numbers of the micro-batches that start in this step.
        released: By stage, the number of the step whose gradients the stage applies now; no entry if none.
        finished: Numbers of the micro-batches whose last backward pass runs in this step.
    """

    orders: Orders
    micros: range
    number: int
    released: Mapping[int, int]
    finished: list[int]


def one_step_late(num_ranks: int, num_micro: int) -> list[int]:
    return [1 if num_ranks > 1 else 0] * num_ranks


def late_by_depth(num_ranks: int, num_micro: int) -> list[int]:
    return [-(-(num_ranks - 1 - stage) // num_micro) for stage in range(num_ranks)]


class Backlog:
    """Orders the passes of all micro-batches in flight. Every rank computes the same orders."""

    def __init__(self, delays: list[int]) -> None:
        self._delays = delays
        self._pending: list[deque[int]] = [deque() for _ in delays]
        self._step_of: dict[int, int] = {}
        self._next_micro = 0
        self._next_step = 0
        self._last_step: int | None = None

    @property
    def steps_left(self) -> int:
        """Number of further steps, without new rows, until all gradients are applied."""
        if self._last_step is None:
            return 0
        return max(0, self._last_step + max(self._delays) + 1 - self._next_step)

    def step(self, num_micro: int, *, is_drain: bool = False) -> DelayedStep:
        number = self._next_step
        self._next_step += 1
        if not is_drain:
            self._last_step = number
        micros = range(self._next_micro, self._next_micro + num_micro)
        self._next_micro = micros.stop
        self._step_of |= dict.fromkeys(micros, number)
        has_rows = set(self._step_of.values())
        orders: Orders = []
        released = {}
        for stage, (pending, delay) in enumerate(zip(self._pending, self._delays, strict=True)):
            order = []
            for micro in micros:
                order.append(Action(PassType.FORWARD, stage, micro))
                pending.append(micro)
                if len(pending) > len(self._delays) - 1 - stage:
                    order.append(Action(PassType.BACKWARD, stage, pending.popleft()))
            while pending and self._step_of[pending[0]] <= number - delay:
                order.append(Action(PassType.BACKWARD, stage, pending.popleft()))
            orders.append(order)
            if number - delay in has_rows:
                released[stage] = number - delay
        # Micro-batches are kept until the latest stage has released their step.
        oldest = number - max(self._delays)
        finished = [micro for micro, step in self._step_of.items() if step <= oldest]
        for micro in finished:
            del self._step_of[micro]
        return DelayedStep(orders=orders, micros=micros, number=number, released=released, finished=finished)
