"""Base of collectives over a network: tensors on CPUs go through shared memory if all ranks share one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ringspark.estimators.collectives.base import ConnectedMember, ReduceOp, num_bytes
from ringspark.estimators.collectives.operation_times import AsyncOperation, record
from ringspark.estimators.collectives.shared_memory import REMEDY, SharedMemory
from ringspark.estimators.collectives.traffic import Member


class NetworkCollective(ConnectedMember, ABC):
    def __init__(self, member: Member) -> None:
        super().__init__(member)
        self._memory: SharedMemory | None = None
        # Horovod matches the ranks' tensors by name; the counter gives each operation a new one.
        self._operations = 0

    def share(self, memory: SharedMemory | None) -> None:
        """Sets the shared memory for operations on CPUs; None uses the library. Runs on every rank."""
        if self._memory is not None:
            self._memory.close()
        self._memory = memory
        if memory is not None:
            self.on_leave(partial(self.share, None))

    def _memory_for(self, *tensors: torch.Tensor) -> SharedMemory | None:
        return self._memory if all(tensor.device.type == "cpu" for tensor in tensors) else None

    def sends_at_once(self, device: torch.device) -> bool:
        return self._memory is None or device.type != "cpu"

    @record
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        # The libraries add tensors element by element in memory order, which may differ between ranks.
        tensor = tensor.detach().contiguous()
        if memory := self._memory_for(tensor):
            result = tensor.clone()
            memory.all_reduce_(result.view(-1), op)
        else:
            result = self._all_reduce(tensor.clone(), op)
        self.traffic.all_reduce(num_bytes([result]))
        return result

    def start_sum(self, tensor: torch.Tensor, name: str) -> Callable[[], None]:
        self.traffic.all_reduce(num_bytes([tensor]))
        if memory := self._memory_for(tensor):
            # It runs when it is waited for; during a backward pass that keeps the cores busy it would gain
            # nothing.
            return self.operations.record_when_waited(
                name, partial(memory.all_reduce_, tensor.view(-1), "sum")
            )
        return self.operations.record_async(
            name, partial(self._start_all_reduce, tensor, f"ringspark.{name}")
        )

    def start_reduce_scatter(self, tensor: torch.Tensor, counts: Sequence[int]) -> Callable[[], torch.Tensor]:
        tensor, memory = tensor.detach().contiguous(), self._memory_for(tensor)
        if memory is None and len(set(counts)) > 1:
            # One all-reduce instead of one reduce per rank: the libraries only support equal shards.
            whole = tensor.clone()
            start_sum = partial(self._start_all_reduce, whole, self._name("reduce_scatter"))
            wait_for_sum = self.operations.record_async("reduce_scatter", start_sum)
            self.traffic.all_reduce(num_bytes([whole]))

            def wait() -> torch.Tensor:
                wait_for_sum()
                return torch.split(whole, list(counts))[self.rank].clone()

            return wait
        self.traffic.reduce_scatter([n * tensor.element_size() for n in counts])
        if memory is None:
            start = partial(self._start_reduce_scatter, tensor)
            return self.operations.record_async("reduce_scatter", start)
        begin = sum(counts[: self.rank])
        run = partial(memory.reduce_scatter, tensor, begin, begin + counts[self.rank])
        return self.operations.record_when_waited("reduce_scatter", run)

    @record
    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int] | None = None) -> list[torch.Tensor]:
        tensor, memory = tensor.detach().contiguous(), self._memory_for(tensor)
        if memory is None:
            return self._all_gather(tensor, self._lengths(tensor) if counts is None else counts)
        pieces = memory.all_gather(tensor)
        if counts is None:
            self.traffic.all_gather([8] * self.size)
        self.traffic.all_gather([num_bytes([piece]) for piece in pieces])
        return pieces

    @record
    def gather(
        self, tensor: torch.Tensor, counts: Sequence[int] | None = None, root: int = 0
    ) -> list[torch.Tensor]:
        tensor = tensor.detach().contiguous()
        self.traffic.gather(num_bytes([tensor]), root)
        if memory := self._memory_for(tensor):
            return memory.all_gather(tensor, is_read=self.rank == root)
        # The libraries only gather tensors of equal length, so use an all-to-all.
        counts = self._lengths(tensor) if counts is None else counts
        width = tensor.element_size()
        sent = [len(tensor) * width * (rank == root) for rank in range(self.size)]
        arriving = [count * width * (self.rank == root) for count in counts]
        received = self._all_to_all(tensor.view(torch.uint8), sent, arriving)
        parts = [part.view(tensor.dtype) for part in torch.split(received, arriving)]
        return parts if self.rank == root else []

    @record
    def all_to_all(self, pieces: Sequence[torch.Tensor], counts: Sequence[int]) -> list[torch.Tensor]:
        self.traffic.all_to_all([num_bytes([piece]) for piece in pieces])
        pieces = [piece.detach().contiguous() for piece in pieces]
        memory = self._memory_for(*pieces)
        if memory is not None:
            return memory.all_to_all(pieces)
        # As bytes, because not every library supports every dtype.
        width = pieces[0].element_size()
        joined = torch.cat([piece.view(torch.uint8) for piece in pieces])
        sent, arriving = [len(piece) * width for piece in pieces], [count * width for count in counts]
        received = self._all_to_all(joined, sent, arriving)
        return [part.clone().view(pieces[0].dtype) for part in torch.split(received, arriving)]

    @record
    def broadcast(self, tensors: list[torch.Tensor], root: int = 0) -> None:
        with torch.no_grad():
            dense = [tensor.contiguous() for tensor in tensors]
            if memory := self._memory_for(*dense):
                for tensor in dense:
                    flat = tensor.view(-1)
                    sent = memory.all_gather(flat if self.rank == root else flat[:0])[root]
                    if len(sent) != len(flat):
                        raise ValueError(
                            f"rank {root} sends a tensor of {len(sent)} elements, but rank {self.rank} "
                            f"expects {len(flat)} elements; {REMEDY}"
                        )
                    flat.copy_(sent)
            else:
                # Broadcast bytes, because not every library supports every dtype.
                self._broadcast([tensor.view(-1).view(torch.uint8) for tensor in dense], root)
            for tensor, copy in zip(tensors, dense, strict=True):
                if copy is not tensor:
                    tensor.copy_(copy)
        self.traffic.broadcast(num_bytes(tensors), root)

    @record
    def barrier(self) -> None:
        if self._memory is None:
            self._all_reduce(torch.zeros(1), "sum")
        else:
            self._memory.all_gather(torch.zeros(0))

    def _lengths(self, tensor: torch.Tensor) -> list[int]:
        own = torch.tensor([len(tensor)], device=tensor.device)
        return [int(length) for length in self._all_gather(own, [1] * self.size)]

    def _name(self, operation: str) -> str:
        self._operations += 1
        return f"ringspark.{operation}.{self._operations}"

    def _all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        """All-reduces `tensor` in place, and returns it."""
        self._start_all_reduce(tensor, self._name("allreduce"), op).wait()
        return tensor

    @abstractmethod
    def _start_all_reduce(
        self, tensor: torch.Tensor, name: str, op: ReduceOp = "sum"
    ) -> AsyncOperation[None]: ...

    @abstractmethod
    def _start_reduce_scatter(self, tensor: torch.Tensor) -> AsyncOperation[torch.Tensor]:
        """Reduce-scatters equal shards."""

    @abstractmethod
    def _all_gather(self, tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        """All-gathers, and counts the bytes, which depend on the library's padding."""

    @abstractmethod
    def _all_to_all(self, joined: torch.Tensor, sent: Sequence[int], arriving: Sequence[int]) -> torch.Tensor:
        """Sends `sent[i]` bytes of `joined` to rank i; returns `arriving[i]` bytes from each rank i."""

    @abstractmethod
    def _broadcast(self, tensors: list[torch.Tensor], root: int) -> None: ...
