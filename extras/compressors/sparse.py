"""Sends some elements of a vector with their indices, and sums the elements of all ranks."""

from __future__ import annotations

import torch

from ringspark.estimators.collectives.base import Collective
from ringspark.extras.compressors.base import Sent
from ringspark.extras.compressors.two_rounds import as_bytes

# An index is 2 bytes within its block; each block has a count of 4 bytes.
_BLOCK = 1 << 16


def all_reduce_sparse(
    vector: torch.Tensor,
    places: torch.Tensor,
    values: torch.Tensor,
    collective: Collective,
    *,
    is_equal: bool,
) -> Sent:
    """Sums sparse vectors over the ranks.

    Each rank picked the elements of `vector` at the ascending indices `places`; `values` are the numbers that
    it sends for them. `is_equal`: whether all ranks picked the same number of elements.
    """
    blocks = -(-len(vector) // _BLOCK)
    message = _encode(places, values, blocks)
    counts = [len(message)] * collective.size
    if not is_equal:
        # Without counts, some libraries pad every message to the longest.
        counts = torch.cat(collective.all_gather(torch.tensor([len(message)]), [1] * len(counts))).tolist()
    total = torch.zeros_like(vector)
    # In rank order, so that the sums are bitwise equal on all ranks.
    for arrived in collective.all_gather(message, counts):
        found, theirs = _decode(arrived, blocks, vector.dtype)
        total.index_add_(0, found, theirs)
    error = vector.clone()
    error.index_add_(0, places, values, alpha=-1)
    return Sent(total, error)


def _encode(places: torch.Tensor, values: torch.Tensor, blocks: int) -> torch.Tensor:
    counts = torch.bincount(places // _BLOCK, minlength=blocks).to(torch.int32)
    # int16 keeps the bits of indices from 32768 on, as negative numbers.
    inside = (places % _BLOCK).to(torch.int32).to(torch.int16)
    return torch.cat([as_bytes(counts), as_bytes(inside), as_bytes(values)])


def _decode(message: torch.Tensor, blocks: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    counts = message[: 4 * blocks].clone().view(torch.int32).long()
    picked = int(counts.sum())
    inside = message[4 * blocks : 4 * blocks + 2 * picked].clone().view(torch.int16).long() % _BLOCK
    begins = torch.arange(blocks, device=message.device).repeat_interleave(counts) * _BLOCK
    values = message[4 * blocks + 2 * picked :].clone().view(dtype)
    return begins + inside, values
