"""The operations between ranks, whichever library carries the bytes.

A collective has two halves. `open_rendezvous` runs on rank 0 before anybody is connected and
returns the address that the gang hands to every rank; `connect` then joins. Both get the secret of the
run: a peer without the secret is disconnected. One process holds at most one connected collective at a
time.

Invariant: every rank makes the same sequence of calls. A rank that fails calls `abort`, so that the
pending calls of its peers end in `CollectiveError` instead of hanging.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

import torch

from ringspark.estimators.collectives.network import interface_of
from ringspark.estimators.collectives.operation_times import OperationTimes
from ringspark.estimators.collectives.rendezvous.server import RendezvousServer
from ringspark.estimators.collectives.traffic import Member, Traffic

ReduceOp = Literal["sum", "max", "min"]

# A user who has set it knows a faster network than the one that Spark uses.
_NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"


class CollectiveError(RuntimeError):
    """A collective operation failed, usually because a peer did; it is never the root cause."""


class Rendezvous(Protocol):
    """The meeting point that rank 0 keeps open until the gang has closed."""

    @property
    def address(self) -> str:
        """`host:port`, reachable from every rank."""

    def close(self) -> None:
        """Frees the port."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """How the ranks of a gang find and know each other.

    Attributes:
        address: Address of rank 0's rendezvous.
        secret: Secret of the run.
        timeout_seconds: Longest wait for another rank, in the meeting and in every operation after it.
        use_gpu: Whether gradients are on GPUs.
    """

    address: str
    secret: bytes = field(repr=False)
    timeout_seconds: float = 60.0
    use_gpu: bool = False


class Collective(Protocol):
    """The operations that training uses. All of them block, and run on every rank.

    Attributes:
        traffic: Counter of the bytes sent, also by a strategy whose library sends by itself.
        levels: This rank's host, and the hosts among each other; None on one host or with one rank on each.
        operations: Notes of when the operations were under way, for who measures a step.
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
    def bytes_sent(self) -> int:
        """Payload bytes that this rank has sent so far, as `Traffic` counts them."""

    def sends_at_once(self, device: torch.device) -> bool:
        """Whether a sum of tensors on `device` travels while the rank computes, not only while it waits."""

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        """Returns the reduction of `tensor` over all ranks, in its dtype and on its device."""

    def start_sum(self, tensor: torch.Tensor, name: str) -> Callable[[], None]:
        """Begins to overwrite `tensor` with its sum over all ranks.

        Every rank begins its sums, and waits for them, in the same order.

        Args:
            tensor: Contiguous; it must not be used until the sum is complete.
            name: Name of the sum, equal on all ranks. A name comes back with the same shape in every step,
                so that a library can keep what it agreed on, and is used by one sum at a time.

        Returns:
            A function that waits for the sum. Sums of other names may be under way meanwhile.
        """

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Returns every rank's tensor, in the order of ranks.

        Args:
            tensor: 1-D. Lengths may differ between ranks and may be 0; dtype and device type must agree.
            counts: Length of each rank's tensor, if all ranks know it; this saves an exchange.
        """

    def gather(self, tensor: torch.Tensor, counts: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Like `all_gather`, but only rank 0 gets the tensors; the others get an empty list.

        Args:
            tensor: On the CPU.
        """

    def all_to_all(self, pieces: Sequence[torch.Tensor], counts: Sequence[int]) -> list[torch.Tensor]:
        """Sends each rank its own piece; returns what all ranks sent to this one, in the order of ranks.

        Args:
            pieces: One for each rank; 1-D, of one dtype; lengths may differ and may be 0.
            counts: Length of what each rank sends to this one.
        """

    def start_reduce_scatter(self, tensor: torch.Tensor, counts: Sequence[int]) -> Callable[[], torch.Tensor]:
        """Begins to sum `tensor` over all ranks; each rank gets only its own part of the sum.

        Args:
            tensor: 1-D, of equal length on all ranks; it must not change until the sum is complete.
            counts: Length of each rank's part, in rank order; they add up to the tensor's length.

        Returns:
            A function that waits and returns this rank's part. A few sums may be under way at a time.
        """

    def broadcast(self, tensors: list[torch.Tensor], root: int = 0) -> None:
        """Overwrites `tensors` in place with those of rank `root`."""

    def barrier(self) -> None:
        """Returns once every rank has called it."""

    def on_leave(self, release: Callable[[], None]) -> None:
        """Registers `release`, called before this rank leaves to drop all references to the connections."""

    def close(self) -> None:
        """Leaves the gang normally; every rank calls it after its last operation."""

    def abort(self) -> None:
        """Leaves at once after a failure, so that the peers' pending calls end in an error."""


@dataclass(frozen=True, kw_only=True)
class Levels:
    """The two levels of a gang on several hosts.

    Attributes:
        inside: Collective of the ranks of this host.
        between: Collective of the first rank of each host; None on all other ranks.
    """

    inside: Collective
    between: Collective | None


class ConnectedMember:
    """Base of all collectives: meeting point, place in the gang, bytes sent, what to call at the end."""

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

    def _tell_nccl(self) -> None:
        """Tells NCCL the gang's interface until this rank leaves, as NCCL connects at its first operation."""
        interface = interface_of(self.member.host)
        if interface and _NCCL_INTERFACE not in os.environ:
            # Without "=" it would be a prefix, and eth1 would mean eth10 too.
            os.environ[_NCCL_INTERFACE] = f"={interface}"
            self.on_leave(partial(os.environ.__delitem__, _NCCL_INTERFACE))

    def _release(self) -> None:
        """Calls the functions registered by `on_leave`, once."""
        while self._on_leave:
            self._on_leave.pop()()


def gather_bytes(collective: Collective, data: bytes, *, to_all: bool = True) -> list[bytes]:
    """Returns every rank's bytes, in rank order; a rank may give none. Runs on every rank.

    Args:
        to_all: Whether all ranks get them; if not, only rank 0 does.
    """
    # torch makes no tensor of an empty buffer.
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)
    gather = collective.all_gather if to_all else collective.gather
    return [piece.numpy().tobytes() for piece in gather(mine)]


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@contextmanager
def contiguous(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yields row-major tensors, for libraries that accept no others; copies new values back at the end."""
    dense = [t.contiguous() for t in tensors]
    yield dense
    with torch.no_grad():
        for tensor, copy in zip(tensors, dense, strict=True):
            if copy is not tensor:
                tensor.copy_(copy)


@contextmanager
def peer_errors(operation: str) -> Iterator[None]:
    """Turns a library's error inside a collective operation into `CollectiveError`."""
    try:
        yield
    except CollectiveError:
        raise
    except RuntimeError as error:
        raise CollectiveError(f"{operation} failed: {error}") from error


# Words by which Gloo, NCCL and Horovod report a lost peer when the call is inside autograd.
PEER_SIGNS = (
    "gloo",
    "nccl",
    "horovod",
    "connection closed by peer",
    "connection reset by peer",
    # Gloo's message to all other operations after one of them has waited too long.
    "application timeout caused pair closure",
)


@contextmanager
def backward_errors() -> Iterator[None]:
    """Like `peer_errors`, for user code that communicates inside, such as a backward pass."""
    try:
        yield
    except RuntimeError as error:
        if any(sign in str(error).lower() for sign in PEER_SIGNS):
            raise CollectiveError(f"the gradient exchange failed: {error}") from error
        raise
