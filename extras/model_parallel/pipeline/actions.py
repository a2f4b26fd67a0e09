"""The actions of a pipeline's ranks, and the order in which values arrive.

Stages are numbered along the network: stage 0 gets the rows, the last one has the outputs. Micro-batches are
numbered within a step, or along the training by schedules without a flush.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple


class PassType(str, Enum):
    FORWARD = "F"
    BACKWARD = "B"
    # Halves of a backward pass: gradients of the inputs, for which the previous stage waits, and of the
    # weights, which can wait.
    INPUT = "I"
    WEIGHT = "W"


class Action(NamedTuple):
    """One pass of one stage with one micro-batch."""

    kind: PassType
    stage: int
    micro: int


class Arrival(NamedTuple):
    """The point in a rank's order at which it starts to receive values from rank `source`.

    Attributes:
        is_forward: Whether inputs of the stage arrive, or gradients of its outputs.
        stage: The stage that needs them.
    """

    is_forward: bool
    stage: int
    micro: int
    source: int


Order = Sequence[Action]
Steps = list[Action | Arrival]


class CompletedActions:
    def __init__(self, num_stages: int) -> None:
        self._last = num_stages - 1
        self._done: set[Action] = set()

    def is_ready(self, action: Action) -> bool:
        kind, stage, micro = action
        if kind is PassType.FORWARD:
            return stage == 0 or (PassType.FORWARD, stage - 1, micro) in self._done
        if kind is PassType.WEIGHT:
            return (PassType.INPUT, stage, micro) in self._done
        if (PassType.FORWARD, stage, micro) not in self._done:
            return False
        return stage == self._last or any(
            (kind, stage + 1, micro) in self._done for kind in (PassType.BACKWARD, PassType.INPUT)
        )

    def add(self, action: Action) -> None:
        self._done.add(action)

    def forget(self, micros: Iterable[int]) -> None:
        gone = set(micros)
        self._done = {action for action in self._done if action.micro not in gone}


def with_arrivals(
    orders: Sequence[Order], owners: Sequence[int], progress: CompletedActions | None = None
) -> list[Steps]:
    """Returns each rank's order with an `Arrival` wherever the rank receives a result of another rank.

    Simulates the orders of all ranks in lockstep: when one rank sends a result, the `Arrival` is inserted
    where the receiving rank stands in its own order. So sends and receives between two ranks have the
    same order, and cannot deadlock even if the transport runs them one by one, as NCCL does.
    """
    progress = progress or CompletedActions(len(owners))
    steps: list[Steps] = [[] for _ in orders]
    next_of = [0] * len(orders)
    while any(at < len(order) for at, order in zip(next_of, orders, strict=True)):
        ready = [
            rank
            for rank, order in enumerate(orders)
            if next_of[rank] < len(order) and progress.is_ready(order[next_of[rank]])
        ]
        assert ready, f"the orders of the pipeline wait for each other at {next_of}"
        for rank in ready:
            action = orders[rank][next_of[rank]]
            next_of[rank] += 1
            progress.add(action)
            steps[rank].append(action)
            target = receiver(action, len(owners))
            if target is not None and owners[target] != rank:
                is_forward = action.kind is PassType.FORWARD
                steps[owners[target]].append(Arrival(is_forward, target, action.micro, rank))
    return steps


def receiver(action: Action, num_stages: int) -> int | None:
    """Returns the stage that needs the result of an action, or None."""
    if action.kind is PassType.FORWARD:
        return action.stage + 1 if action.stage + 1 < num_stages else None
    if action.kind is PassType.WEIGHT or action.stage == 0:
        return None
    return action.stage - 1
