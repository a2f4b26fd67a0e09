"""Operations between ranks, independent of the library that sends the bytes.

Rank 0 calls `open_rendezvous`, which returns a server with an address. Every rank joins the gang by
`connect`. A rank that fails calls `abort`, so that pending calls of its peers raise `CollectiveError`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import torch

from ringspark.estimators.collectives.network import interface_of
from ringspark.estimators.collectives.operation_times import OperationTimes
from ringspark.estimators.collectives.rendezvous.server import RendezvousServer
from ringspark.estimators.collectives.traffic import Member, Traffic

ReduceOp = Literal["sum", "max", "min"]
REDUCTIONS: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}

# Users may set it to a faster network than Spark's.
_NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"


class CollectiveError(RuntimeError):
    """A collective operation failed, usually because another rank failed; that failure is the root cause."""


class Rendezvous(Protocol):
    """Rank 0's server, which runs until every rank has left the gang."""

    @property
    def address(self) -> str: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class RendezvousInfo:
    """Settings by which the ranks of a gang connect; the timeout limits each wait for another rank."""

    address: str
    secret: bytes = field(repr=False)
    timeout_seconds: float = 60.0
    use_gpu: bool = False


class Collective(Protocol):
    """Collective operations of a training; every rank calls each one. All except `start_*` block.

    Attributes:
        traffic: Counter of the bytes that this rank sends, also by other libraries such as FSDP2.
        levels: Collectives within hosts and between hosts; None on one host, or with one rank per host.
        operations: Recorder of operation times.
    """

    name: str
    member: Member
    traffic: Traffic
    levels: Levels | None
    operations: OperationTimes

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def bytes_sent(self) -> int: ...

    def sends_at_once(self, device: torch.device) -> bool:
        """Whether an all-reduce of tensors on `device` overlaps with the rank's computing."""

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        """Returns the reduction of `tensor` over all ranks, in its dtype and on its device."""

    def start_sum(self, tensor: torch.Tensor, name: str) -> Callable[[], None]:
        """Starts an all-reduce of `tensor`, in place; returns a function that waits for the result.

        Every rank starts all-reduces, and waits for them, in the same order.

        Args:
            tensor: Contiguous; it must not be used until the all-reduce is complete.
            name: Equal on all ranks. Tensors with the same name have the same shape in every step, so that a
                library can cache its negotiation. All-reduces in flight need different names.
        """

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Returns every rank's tensor, in rank order.

        Args:
            tensor: 1-D. Lengths may differ between ranks and may be 0; dtype and device type must agree.
            counts: Length of each rank's tensor, if all ranks know it; this saves a message.
        """

    def gather(
        self, tensor: torch.Tensor, counts: Sequence[int] | None = None, root: int = 0
    ) -> list[torch.Tensor]:
        """Like `all_gather` on the CPU, but only rank `root` gets the tensors; others get an empty list."""

    def all_to_all(self, pieces: Sequence[torch.Tensor], counts: Sequence[int]) -> list[torch.Tensor]:
        """Sends each rank its own 1-D tensor; returns the tensors for this rank, with lengths `counts`."""

    def start_reduce_scatter(self, tensor: torch.Tensor, counts: Sequence[int]) -> Callable[[], torch.Tensor]:
        """Starts a reduce-scatter; returns a function that waits and returns this rank's shard.

        Args:
            tensor: 1-D, of equal length on all ranks; it must not change until the sum is complete.
            counts: Length of each rank's shard, in rank order.
        """

    def broadcast(self, tensors: list[torch.Tensor], root: int = 0) -> None:
        """Overwrites `tensors` in place with the tensors of rank `root`."""

    def barrier(self) -> None: ...

    def on_leave(self, release: Callable[[], None]) -> None:
        """Registers a function that drops references to the connections, before this rank leaves."""

    def close(self) -> None:
        """Leaves the gang normally; every rank calls it after its last operation."""

    def abort(self) -> None:
        """Leaves at once after a failure, so that pending calls of the peers raise an error."""


@dataclass(frozen=True, kw_only=True)
class Levels:
    """Collectives of a gang on several hosts.

    Attributes:
        inside: Collective of the ranks on this host.
        between: Collective of the first rank of every host; None on all other ranks.
    """

    inside: Collective
    between: Collective | None


class ConnectedMember:
    # A copied network belongs to the same rank, so it uses the same collective.
    belongs_to_rank = True

    def __deepcopy__(self, memo: dict[int, Any]) -> ConnectedMember:
        return self

    @staticmethod
    def open_rendezvous(member: Member, secret: bytes, ports: Sequence[int] = (0,)) -> Rendezvous:
        return RendezvousServer(member.host, member.size, secret, ports)

    def __init__(self, member: Member) -> None:
        self.member = member
        self.traffic = Traffic(member)
        self.operations = OperationTimes()
        self.levels: Levels | None = None
        self._on_leave: list[Callable[[], None]] = [self.operations.drop]

    @property
    def rank(self) -> int:
        return self.member.rank

    @property
    def size(self) -> int:
        return self.member.size

    @property
    def bytes_sent(self) -> int:
        return self.traffic.bytes_sent

    def sends_at_once(self, device: torch.device) -> bool:
        return False

    def on_leave(self, release: Callable[[], None]) -> None:
        self._on_leave.append(release)

    def _set_nccl_interface(self) -> None:
        interface = interface_of(self.member.host)
        if interface and _NCCL_INTERFACE not in os.environ:
            # Without "=" it would be a prefix: eth1 would match eth10 too.
            os.environ[_NCCL_INTERFACE] = f"={interface}"
            self.on_leave(partial(os.environ.__delitem__, _NCCL_INTERFACE))

    def _release(self) -> None:
        while self._on_leave:
            self._on_leave.pop()()


def gather_bytes(collective: Collective, data: bytes, *, to_all: bool = True) -> list[bytes]:
    """Returns every rank's bytes, in rank order, on all ranks or on rank 0. Runs on every rank."""
    # torch refuses an empty buffer.
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)
    gather = collective.all_gather if to_all else collective.gather
    return [piece.numpy().tobytes() for piece in gather(mine)]


def all_reduce_together(tensors: Sequence[torch.Tensor], collective: Collective) -> list[torch.Tensor]:
    """All-reduces tensors of one dtype in one message. Runs on every rank."""
    joined = collective.all_reduce(torch.cat([tensor.reshape(-1) for tensor in tensors]))
    parts = torch.split(joined, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@contextmanager
def peer_errors(operation: str) -> Iterator[None]:
    """Turns a library's error inside a collective operation into `CollectiveError`."""
    try:
        yield
    except CollectiveError:
        raise
    except RuntimeError as error:
        raise CollectiveError(f"{operation} failed: {error}") from error


# Words by which Gloo, NCCL and Horovod report a lost peer if the call is inside autograd.
PEER_SIGNS = (
    "gloo",
    "nccl",
    "horovod",
    "connection closed by peer",
    "connection reset by peer",
    # Gloo's message to all other operations after one has timed out.
    "application timeout caused pair closure",
)


@contextmanager
def backward_errors() -> Iterator[None]:
    """Like `peer_errors`, for user code that communicates, such as a backward pass."""
    try:
        yield
    except RuntimeError as error:
        if any(sign in str(error).lower() for sign in PEER_SIGNS):
            raise CollectiveError(f"the gradient synchronization failed: {error}") from error
        raise
