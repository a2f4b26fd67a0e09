"""Whole sums inside a host, compressed ones between hosts.

Inside a host ranks share memory, where compression costs more than it saves. So the ranks of a host add their
vectors up as they are, the host's first rank exchanges the sum with those of the other hosts, and gives its
own host the result. What the network carries does not depend on the number of ranks on a host.

Invariant: what the total lacks is in the errors of the hosts' first ranks alone; those of the others are 0.
"""

from __future__ import annotations

import torch

from ringspark.estimators.collectives.base import Collective, Levels
from ringspark.estimators.collectives.compressors.base import Compressor, Sent
from ringspark.estimators.collectives.local_collective import LocalCollective


def levels_of(collective: Collective) -> Levels:
    """Returns the levels of a gang, also of one that has ranks on one host, or one rank on each."""
    if collective.levels is not None:
        return collective.levels
    alone = LocalCollective()
    if len(collective.member.leaders) == 1:
        return Levels(inside=collective, between=alone)
    return Levels(inside=alone, between=collective)


def sum_of_hosts(vector: torch.Tensor, compressor: Compressor, levels: Levels, step: int) -> Sent:
    """Sums the ranks' vectors; see `Compressor.sum`. Runs on every rank."""
    summed = levels.inside.all_reduce(vector)
    error = torch.zeros_like(vector)
    if levels.between is None:
        total = torch.empty_like(vector)
    elif levels.between.size == 1:
        total = summed
    else:
        sent = compressor.sum(summed, levels.between, step)
        total, error = sent.total, error if sent.error is None else sent.error
    levels.inside.broadcast([total])
    return Sent(total, error)
