"""Sums a tensor over the ranks of one host, through memory that all of them map."""

from __future__ import annotations

import mmap

import torch

from ringspark.estimators.collectives.shared_memory import MOST_RANKS, SharedMemory

# The most bytes that a rank reads for one sum. Each rank reads the tensors of all, so the ring of a library
# is faster for large tensors of many ranks.
LARGEST_BYTES = 32 << 20


class SharedSum:
    """Two places in shared memory for the tensor of each rank.

    Args:
        memory: The ranks' memory.
        region: A part of it, for two places of each rank.
        tensor: A tensor with the size and dtype of all that are summed.
    """

    def __init__(self, memory: SharedMemory, rank: int, region: mmap.mmap, tensor: torch.Tensor) -> None:
        self._memory = memory
        self._rank = rank
        places = torch.frombuffer(region, dtype=tensor.dtype, count=2 * memory.size * tensor.numel())
        self._places = places.view(2, memory.size, tensor.numel())
        self._turn = 0
        self._number = 0

    def start(self, tensor: torch.Tensor) -> None:
        """Shows the peers this rank's tensor; call `finish` before the next."""
        self._turn ^= 1
        self._places[self._turn, self._rank].copy_(tensor.view(-1))
        self._number = self._memory.tell()

    def finish(self, tensor: torch.Tensor) -> None:
        """Waits for the peers and overwrites the tensor with the sum, added up in the order of ranks."""
        self._memory.wait(self._number)
        first, *others = self._places[self._turn]
        flat = tensor.view(-1)
        torch.add(first, others[0], out=flat)
        for other in others[1:]:
            flat.add_(other)


def is_for_shared_sum(num_bytes: int, num_ranks: int) -> bool:
    """Whether ranks of one host sum a tensor of so many bytes through shared memory."""
    return 1 < num_ranks <= MOST_RANKS and 0 < num_bytes * num_ranks <= LARGEST_BYTES


def open_shared_sum(memory: SharedMemory, rank: int, tensor: torch.Tensor) -> SharedSum | None:
    """Takes memory for sums of tensors like this one. Runs on every rank.

    Returns:
        None, on every rank, where the tensor is not for it or memory is short.
    """
    if tensor.device.type != "cpu" or not is_for_shared_sum(tensor.nbytes, memory.size):
        return None
    region = memory.extended(2 * memory.size * tensor.nbytes)
    return None if region is None else SharedSum(memory, rank, region, tensor)
