"""Runs a schedule without a network: when each action would begin and end if only the work took time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ringspark.estimators.parallel.model.pipeline.actions import Action, Kind, Order, Progress
from ringspark.estimators.parallel.model.pipeline.timeline import Timed

# A backward pass takes twice a forward pass, and half of it is for the inputs (Qi et al. 2023).
UNITS = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.INPUT: 1.0, Kind.WEIGHT: 1.0}


def simulated(
    orders: Sequence[Order],
    num_stages: int,
    cost: Callable[[Action], float] = lambda action: UNITS[action.kind],
) -> list[list[Timed]]:
    """Returns each rank's actions with their times, in the unit of the costs; sending takes none."""
    progress = Progress(num_stages)
    ends: dict[Action, float] = {}
    timelines: list[list[Timed]] = [[] for _ in orders]
    while any(len(timeline) < len(order) for timeline, order in zip(timelines, orders, strict=True)):
        before = len(ends)
        for timeline, order in zip(timelines, orders, strict=True):
            while len(timeline) < len(order) and progress.is_ready(order[len(timeline)]):
                action = order[len(timeline)]
                begin = max([0.0, *(timed.end for timed in timeline[-1:]), *_needed(action, ends)])
                ends[action] = begin + cost(action)
                timeline.append(Timed(action, begin, ends[action]))
                progress.add(action)
        assert len(ends) > before, "the order of the pipeline never ends"
    return timelines


def most_live(orders: Sequence[Order]) -> list[int]:
    """Returns how many micro-batches each rank holds activations of at most, summed over its stages."""
    found = []
    for order in orders:
        live, most = 0, 0
        for action in order:
            live += (action.kind is Kind.FORWARD) - (action.kind in (Kind.BACKWARD, Kind.WEIGHT))
            most = max(most, live)
        found.append(most)
    return found


def _needed(action: Action, ends: dict[Action, float]) -> list[float]:
    """Returns when the other stages' actions end that this one needs."""
    kind, stage, micro = action
    if kind is Kind.FORWARD:
        needed = [Action(Kind.FORWARD, stage - 1, micro)]
    elif kind is Kind.WEIGHT:
        needed = []
    else:
        needed = [Action(k, stage + 1, micro) for k in (Kind.BACKWARD, Kind.INPUT)]
    return [ends[action] for action in needed if action in ends]
