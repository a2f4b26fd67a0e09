"""Uncompressed sums within a host, compressed sums between hosts.

The ranks of a host sum their vectors, the host's first rank compresses the sum and sums it with other hosts'
sums, and broadcasts the result within its host. Only the first rank of each host has an error.
"""

from __future__ import annotations

import torch

from ringspark.estimators.collectives.base import Collective, Levels
from ringspark.estimators.collectives.compressors.base import Compressor, Sent
from ringspark.estimators.collectives.local_collective import LocalCollective


def find_levels(collective: Collective) -> Levels:
    """Returns the levels of a gang, also with one host, or with one rank per host."""
    if collective.levels is not None:
        return collective.levels
    alone = LocalCollective()
    if len(collective.member.leaders) == 1:
        return Levels(inside=collective, between=alone)
    return Levels(inside=alone, between=collective)


def all_reduce_by_host(vector: torch.Tensor, compressor: Compressor, levels: Levels, step: int) -> Sent:
    """Sums the ranks' vectors like `Compressor.sum`. Runs on every rank."""
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
