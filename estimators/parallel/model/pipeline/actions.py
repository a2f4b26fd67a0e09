"""What a rank of a pipeline does, and in which order its values arrive.

A stage number counts along the network: 0 takes the rows, the last one gives the outputs. A rank has one
stage, or several. A micro-batch number counts within a step, or for schedules without a flush along the
training.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple


class Kind(str, Enum):
    """What is computed."""

    FORWARD = "F"
    BACKWARD = "B"
    # The two halves of a backward pass: gradients of a stage's inputs, for which the stage before it waits,
    # and gradients of its weights, which can wait.
    INPUT = "I"
    WEIGHT = "W"


class Action(NamedTuple):
    """One stage's work on one micro-batch."""

    kind: Kind
    stage: int
    micro: int


class Arrival(NamedTuple):
    """The point in a rank's order at which it begins to receive what another rank computes.

    Attributes:
        is_forward: Whether the inputs of the stage arrive, or the gradients of its outputs.
        stage: The stage that needs them.
        source: Rank that sends them.
    """

    is_forward: bool
    stage: int
    micro: int
    source: int


Order = Sequence[Action]
Steps = list[Action | Arrival]


class Progress:
    """What all ranks of a pipeline have computed, as each of them knows without asking."""

    def __init__(self, num_stages: int) -> None:
        self._last = num_stages - 1
        self._done: set[Action] = set()

    def is_ready(self, action: Action) -> bool:
        """Whether everything that the action needs is computed."""
        kind, stage, micro = action
        if kind is Kind.FORWARD:
            return stage == 0 or (Kind.FORWARD, stage - 1, micro) in self._done
        if kind is Kind.WEIGHT:
            return (Kind.INPUT, stage, micro) in self._done
        if (Kind.FORWARD, stage, micro) not in self._done:
            return False
        return stage == self._last or any(
            (kind, stage + 1, micro) in self._done for kind in (Kind.BACKWARD, Kind.INPUT)
        )

    def add(self, action: Action) -> None:
        self._done.add(action)

    def forget(self, micros: Iterable[int]) -> None:
        """Forgets finished micro-batches, so that a long training needs no more memory than a short one."""
        gone = set(micros)
        self._done = {action for action in self._done if action.micro not in gone}


def with_arrivals(
    orders: Sequence[Order], owners: Sequence[int], progress: Progress | None = None
) -> list[Steps]:
    """Adds to every rank's order the points at which it begins to receive.

    All ranks go through their orders side by side. What an action sends is received at the point that the
    receiver has reached then. So sends and receives of any two ranks lie in one order, which can not deadlock
    even where the transport works through them one by one, as NCCL does.

    Args:
        orders: Actions of each rank.
        owners: Rank of each stage.
        progress: What is computed before; moved on.

    Returns:
        Each rank's actions and arrivals.
    """
    progress = progress or Progress(len(owners))
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
                is_forward = action.kind is Kind.FORWARD
                steps[owners[target]].append(Arrival(is_forward, target, action.micro, rank))
    return steps


def receiver(action: Action, num_stages: int) -> int | None:
    """Returns the stage that needs the result of an action; None if none does."""
    if action.kind is Kind.FORWARD:
        return action.stage + 1 if action.stage + 1 < num_stages else None
    if action.kind is Kind.WEIGHT or action.stage == 0:
        return None
    return action.stage - 1
