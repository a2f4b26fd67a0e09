"""Chooses for each operation between the memory that ranks of one host share and the library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import torch

from ringspark.estimators.collectives.base import ConnectedMember, ReduceOp, contiguous, num_bytes
from ringspark.estimators.collectives.shared_memory import SharedMemory
from ringspark.estimators.collectives.shared_sum import SharedSum, open_shared_sum
from ringspark.estimators.collectives.traffic import Member

# The most bytes of a rank that go through shared memory where all ranks know the size beforehand; it takes
# a round for each 64 KiB, and each rank reads what all others show.
_MOST_BYTES = 1 << 20

_REDUCTIONS: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


class SharingMember(ConnectedMember, ABC):
    """Base of the collectives over a network; methods that begin with an underscore go by the library.

    Both ways give the same results, except for the order in which floating-point numbers are added.
    """

    # None where the ranks do not share any.
    _memory: SharedMemory | None = None

    def __init__(self, member: Member) -> None:
        super().__init__(member)
        self._sums: dict[tuple[str, torch.Size, torch.dtype], SharedSum | None] = {}

    def share(self, memory: SharedMemory | None) -> None:
        """Lets small operations go through the memory from now on, or none. Runs on every rank."""
        if self._memory is not None:
            self._memory.close()
        self._memory = memory
        self._sums.clear()
        if memory is not None:
            self.on_leave(partial(self.share, None))

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        if memory := self._memory_for(tensor, num_bytes([tensor])):
            pieces = memory.exchange(_bytes_of(tensor))
            result = reduce(_REDUCTIONS[op], [_tensor_of(piece, tensor) for piece in pieces])
        else:
            result = self._all_reduce(tensor, op)
        self.traffic.all_reduce(num_bytes([result]))
        return result

    def start_sum(self, tensor: torch.Tensor, name: str) -> Callable[[], None]:
        key = (name, tensor.shape, tensor.dtype)
        if self._memory and key not in self._sums:
            self._sums[key] = open_shared_sum(self._memory, self.rank, tensor)
        self.traffic.all_reduce(num_bytes([tensor]))
        shared = self._sums.get(key)
        if shared is None:
            return self._start_sum(tensor, name)
        shared.start(tensor)
        return partial(shared.finish, tensor)

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int] | None = None) -> list[torch.Tensor]:
        pieces = self._gathered(tensor, counts)
        if pieces is None:
            return self._all_gather(tensor.detach(), counts)
        if counts is None:
            self.traffic.all_gather([8] * self.size)
        self.traffic.all_gather([num_bytes([piece]) for piece in pieces])
        return pieces

    def gather(self, tensor: torch.Tensor, counts: Sequence[int] | None = None) -> list[torch.Tensor]:
        self.traffic.gather(num_bytes([tensor]))
        pieces = self._gathered(tensor, counts, is_read=self.rank == 0)
        return self._gather(tensor.detach(), counts) if pieces is None else pieces

    def broadcast(self, tensors: list[torch.Tensor], root: int = 0) -> None:
        with contiguous(tensors) as dense:
            if self._memory and all(self._memory_for(t, num_bytes(dense)) for t in dense):
                self._broadcast_shared(self._memory, dense, root)
            else:
                self._broadcast(dense, root)
        self.traffic.broadcast(num_bytes(tensors), root)

    def barrier(self) -> None:
        if self._memory is None:
            self._barrier()
        else:
            self._memory.exchange(b"", is_read=False)

    def _memory_for(self, tensor: torch.Tensor, num_bytes: int) -> SharedMemory | None:
        """Returns the memory through which data of so many bytes go; None for the library."""
        is_for_it = tensor.device.type == "cpu" and num_bytes <= _MOST_BYTES
        return self._memory if is_for_it else None

    def _gathered(
        self, tensor: torch.Tensor, counts: Sequence[int] | None, *, is_read: bool = True
    ) -> list[torch.Tensor] | None:
        """Returns the ranks' tensors, as far as this rank reads them; None if the library has to gather."""
        # Where a rank knows only its own length, all have to choose the same way without it.
        most = 0 if counts is None else max(counts) * tensor.element_size()
        memory = self._memory_for(tensor, most)
        if memory is None:
            return None
        pieces = memory.exchange(_bytes_of(tensor), is_read=is_read)
        return [_tensor_of(piece, tensor, is_flat=True) for piece in pieces]

    def _broadcast_shared(self, memory: SharedMemory, tensors: list[torch.Tensor], root: int) -> None:
        sent = memory.exchange(b"".join(map(_bytes_of, tensors)) if self.rank == root else b"")[root]
        begin = 0
        for tensor in tensors:
            end = begin + num_bytes([tensor])
            with torch.no_grad():
                tensor.copy_(_tensor_of(sent[begin:end], tensor))
            begin = end

    @abstractmethod
    def _all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor: ...

    @abstractmethod
    def _start_sum(self, tensor: torch.Tensor, name: str) -> Callable[[], None]: ...

    @abstractmethod
    def _all_gather(self, tensor: torch.Tensor, counts: Sequence[int] | None) -> list[torch.Tensor]:
        """Gathers and counts the bytes, which depend on what the library pads."""

    @abstractmethod
    def _gather(self, tensor: torch.Tensor, counts: Sequence[int] | None) -> list[torch.Tensor]: ...

    @abstractmethod
    def _broadcast(self, tensors: list[torch.Tensor], root: int) -> None:
        """Broadcasts tensors that lie row by row."""

    @abstractmethod
    def _barrier(self) -> None: ...


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _tensor_of(data: bytes, like: torch.Tensor, *, is_flat: bool = False) -> torch.Tensor:
    """Returns a new tensor of the dtype of `like`, and of its shape unless flat."""
    # torch makes no tensor of an empty buffer.
    flat = torch.frombuffer(bytearray(data), dtype=like.dtype) if data else like.new_empty(0)
    return flat if is_flat else flat.view(like.shape)
