"""The times of a schedule's actions, simulated as if only computing takes time."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ringspark.extras.model_parallel.pipeline.actions import Action, CompletedActions, Order, PassType

# A backward pass takes as long as two forward passes, half of it for the inputs (Qi et al. 2023).
UNITS = {PassType.FORWARD: 1.0, PassType.BACKWARD: 2.0, PassType.INPUT: 1.0, PassType.WEIGHT: 1.0}


class Timed(NamedTuple):
    """An action with the begin and end of its computation."""

    action: Action
    begin: float
    end: float


def simulate(
    orders: Sequence[Order],
    num_stages: int,
    cost: Callable[[Action], float] = lambda action: UNITS[action.kind],
) -> list[list[Timed]]:
    """Returns each rank's actions with their times, in the unit of the costs."""
    progress = CompletedActions(num_stages)
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


def count_live(orders: Sequence[Order]) -> list[int]:
    """Returns each rank's largest number of micro-batches with activations."""
    found = []
    for order in orders:
        live, most = 0, 0
        for action in order:
            live += (action.kind is PassType.FORWARD) - (action.kind in (PassType.BACKWARD, PassType.WEIGHT))
            most = max(most, live)
        found.append(most)
    return found


def _needed(action: Action, ends: dict[Action, float]) -> list[float]:
    kind, stage, micro = action
    if kind is PassType.FORWARD:
        needed = [Action(PassType.FORWARD, stage - 1, micro)]
    elif kind is PassType.WEIGHT:
        needed = []
    else:
        needed = [Action(k, stage + 1, micro) for k in (PassType.BACKWARD, PassType.INPUT)]
    return [ends[action] for action in needed if action in ends]


def bubble_share(ranks: Sequence[Sequence[Any]]) -> float:
    """Returns the waiting time of all ranks as a share of the total time of all ranks.

    Each rank's work has a `begin` and an `end`, as in `Timed`.
    """
    begin = min(timed.begin for rank in ranks for timed in rank)
    end = max(timed.end for rank in ranks for timed in rank)
    busy = sum(timed.end - timed.begin for rank in ranks for timed in rank)
    return 1 - busy / (len(ranks) * (end - begin))
