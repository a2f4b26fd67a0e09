"""Tied parameters that several stages use, such as an embedding that is also a language model's head.

Each copy gets the sum of all gradients, added in the order of stages, so that the copies stay bitwise equal.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ringspark.extras.model_parallel.pipeline.wire import PointToPoint, Wait
from ringspark.models.chain import Link, belongs_to


@dataclass(frozen=True)
class Tie:
    """One parameter on several ranks; the first rank owns it.

    Attributes:
        stages: Each rank's first stage that uses it, ascending.
        names: The parameter's name on each rank.
    """

    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    names: tuple[str, ...]


def find_ties(network: nn.Module, stages: Sequence[Sequence[Link]], owners: Sequence[int]) -> list[Tie]:
    """Returns the parameters that several ranks use, from the layers and the rank of every stage."""
    # A parameter may have several names, and a stage may know only one of them.
    names: dict[int, list[str]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    ties = []
    for own in names.values():
        places: dict[int, tuple[int, str]] = {}
        for stage, (links, rank) in enumerate(zip(stages, owners, strict=True)):
            parts = [part for link in links for part in link.parts]
            used = [name for name in own if any(belongs_to(name, part) for part in parts)]
            if used:
                places.setdefault(rank, (stage, used[0]))
        if len(places) > 1:
            ties.append(
                Tie(
                    tuple(stage for stage, _ in places.values()),
                    tuple(places),
                    tuple(name for _, name in places.values()),
                )
            )
    return ties


class TiedGradients:
    def __init__(self, network: nn.Module, ties: Sequence[Tie], collective: PointToPoint, rank: int) -> None:
        parameters = dict(network.named_parameters(remove_duplicate=False))
        # In the order of all ties, which is the same on all ranks.
        self._own: list[tuple[Tie, nn.Parameter]] = [
            (tie, parameters[tie.names[tie.ranks.index(rank)]]) for tie in ties if rank in tie.ranks
        ]
        self._collective = collective
        self._rank = rank

    @property
    def names(self) -> dict[str, tuple[int, ...]]:
        """Names of this rank's tied parameters, and the ranks that have each of them."""
        return {tie.names[tie.ranks.index(self._rank)]: tie.ranks for tie, _ in self._own}

    @property
    def copies(self) -> frozenset[str]:
        return frozenset(
            tie.names[tie.ranks.index(self._rank)] for tie, _ in self._own if tie.ranks[0] != self._rank
        )

    def add(self, released: Collection[int] | None = None) -> None:
        """Sets each copy's gradient to the sum over all copies. Runs on every rank.

        Skips parameters that none of the stages `released` uses; None skips no parameter.
        """
        for tie, parameter in self._own:
            if not parameter.requires_grad:
                continue
            if released is not None and not set(released) & set(tie.stages):
                continue
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
            gradients = [own if rank == self._rank else torch.empty_like(own) for rank in tie.ranks]
            waits: list[Wait] = []
            for rank, gradient in zip(tie.ranks, gradients, strict=True):
                # The lower rank sends first, because some transports run the operations of two ranks one by
                # one.
                if self._rank < rank:
                    waits.append(self._collective.start_send(own, rank))
                if self._rank != rank:
                    waits.append(self._collective.start_receive(gradient, rank))
                if self._rank > rank:
                    waits.append(self._collective.start_send(own, rank))
            for wait in waits:
                wait()
            total = gradients[0].clone()
            for gradient in gradients[1:]:
                total += gradient
            parameter.grad = total

    def share(self) -> None:
        """Overwrites the copies with the owner's parameter. Runs on every rank."""
        waits: list[Wait] = []
        for tie, parameter in self._own:
            data = parameter.detach()
            assert data.is_contiguous()
            if tie.ranks[0] == self._rank:
                waits += [self._collective.start_send(data, to) for to in tie.ranks[1:]]
            else:
                self._collective.start_receive(data, tie.ranks[0])()
        for wait in waits:
            wait()
