"""Runs a schedule without a network on ranks that share the cores of their hosts.

Like `pipeline.simulation`, but of the actions that run at a moment each gets its share of the cores: a rank
whose values have arrived never waits for another rank's turn, and is slowed down by those that compute too.
"""

from __future__ import annotations

from collections.abc import Callable

from ringspark.estimators.parallel.model.pipeline.actions import Action, Progress
from ringspark.estimators.parallel.model.pipeline.orders import Orders


def makespan(orders: Orders, num_stages: int, cost: Callable[[Action], float], slots: float) -> float:
    """Returns when the last action ends, in the unit of the costs.

    Args:
        orders: What each rank does.
        cost: Time of an action that nothing slows down.
        slots: Actions that run at full speed at a time; below 1, even one alone is slowed down.
    """
    progress = Progress(num_stages)
    next_of = [0] * len(orders)
    running: dict[int, float] = {}
    now = 0.0
    while True:
        for rank, order in enumerate(orders):
            if rank not in running and next_of[rank] < len(order) and progress.is_ready(order[next_of[rank]]):
                running[rank] = cost(order[next_of[rank]])
        if not running:
            assert all(at == len(order) for at, order in zip(next_of, orders, strict=True))
            return now
        speed = min(1.0, slots / len(running))
        passed = min(running.values())
        now += passed / speed
        for rank in list(running):
            running[rank] -= passed
            # What ends together ends at once, whatever the last digits say.
            if running[rank] <= 1e-12 * passed:
                del running[rank]
                progress.add(orders[rank][next_of[rank]])
                next_of[rank] += 1
