"""Simulates a pipeline schedule on ranks that share cores.

Like `pipeline.simulation`, but all running actions share the cores equally, so a rank never waits for a core
and is slowed down by other running ranks.
"""

from __future__ import annotations

from collections.abc import Callable

from ringspark.estimators.parallel.model.pipeline.actions import Action, Progress
from ringspark.estimators.parallel.model.pipeline.orders import Orders


def simulate_makespan(
    orders: Orders, num_stages: int, cost: Callable[[Action], float], slots: float
) -> float:
    """Returns the end of the last action, in the unit of the costs.

    Args:
        orders: Actions of each rank.
        cost: Time of an action at full speed.
        slots: Number of actions that run at full speed together; below 1, a single action is slower too.
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
            # A tolerance, so that simultaneous actions end together.
            if running[rank] <= 1e-12 * passed:
                del running[rank]
                progress.add(orders[rank][next_of[rank]])
                next_of[rank] += 1
