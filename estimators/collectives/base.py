"""What a rank needs from the others, whatever carries the bytes.

A collective has two halves. `open_rendezvous` runs on rank 0 before anybody is connected and
returns the address that the gang hands to every rank; `connect` then joins. Both get the secret of the
run: who does not know it is told nothing and heard no further. One process holds at most one connected
collective at a time.

Invariant: every rank makes the same sequence of calls. A rank that fails calls `abort`, which
makes the calls that its peers wait in end as `CollectiveError` instead of hanging.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, Protocol

import torch

from ringspark.estimators.collectives.traffic import Member, Traffic

ReduceOp = Literal["sum", "max", "min"]


class CollectiveError(RuntimeError):
    """A collective operation failed, as a rule because a peer did: never the root cause itself."""


class Rendezvous(Protocol):
    """The meeting point that rank 0 keeps open until the gang has closed."""

    @property
    def address(self) -> str:
        """`host:port`, reachable from every rank."""

    def close(self) -> None:
        """Frees the port."""


class Collective(Protocol):
    """The operations that training uses. All of them block, and run on every rank.

    Attributes:
        traffic: Counts what is sent, also by a strategy whose library sends by itself.
    """

    name: str
    member: Member
    traffic: Traffic

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def bytes_sent(self) -> int:
        """Payload that this rank has sent so far, by the ring's count: see `Traffic`."""

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        """Returns the reduction of `tensor` over all ranks, in its dtype and on its device."""

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Returns every rank's tensor, in the order of ranks.

        Args:
            tensor: 1-D; ranks may give different lengths, also none, but one dtype and device type.
            counts: The length of each rank's tensor where all ranks know them, which saves telling.
        """

    def start_reduce_scatter(self, tensor: torch.Tensor, counts: Sequence[int]) -> Callable[[], torch.Tensor]:
        """Begins to sum `tensor` over all ranks, each of which gets its own part of the sum only.

        Args:
            tensor: 1-D, of one length on all ranks; must not change until the sum is there.
            counts: The length of each rank's part, in the order of ranks; they add up to the tensor.

        Returns:
            A function that waits and returns this rank's part. A few may be under way at a time.
        """

    def broadcast(self, tensors: list[torch.Tensor], root: int = 0) -> None:
        """Overwrites `tensors` in place by those of rank `root`."""

    def barrier(self) -> None:
        """Returns once every rank is here."""

    def on_leave(self, release: Callable[[], None]) -> None:
        """Has `release` called before this rank leaves: it drops what still refers to the connections."""

    def close(self) -> None:
        """Leaves in good order: every rank calls it after its last operation."""

    def abort(self) -> None:
        """Leaves at once after a failure, so that the peers' pending calls end in an error."""


class ConnectedMember:
    """What every collective has: its place in the gang, its bytes, and what to release at the end."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.traffic = Traffic(member)
        self._on_leave: list[Callable[[], None]] = []

    @property
    def rank(self) -> int:
        return self.member.rank

    @property
    def size(self) -> int:
        return self.member.size

    @property
    def bytes_sent(self) -> int:
        return self.traffic.bytes_sent

    def on_leave(self, release: Callable[[], None]) -> None:
        self._on_leave.append(release)

    def _release(self) -> None:
        """Runs what waits for the end, once."""
        while self._on_leave:
            self._on_leave.pop()()


def gather_bytes(collective: Collective, data: bytes) -> list[bytes]:
    """Every rank's bytes, in the order of ranks; a rank may give none. Runs on every rank."""
    # torch makes no tensor of an empty buffer.
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)
    return [piece.numpy().tobytes() for piece in collective.all_gather(mine)]


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@contextmanager
def contiguous(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The tensors in row-major order, for libraries that take no other; what they become is copied back."""
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


# How Gloo, NCCL and Horovod speak of a lost peer where the call is inside autograd.
PEER_SIGNS = (
    "gloo",
    "nccl",
    "horovod",
    "connection closed by peer",
    "connection reset by peer",
    # Gloo's word to the other operations when one of them has waited too long.
    "application timeout caused pair closure",
)


@contextmanager
def backward_errors() -> Iterator[None]:
    """Like `peer_errors` for code of the user's that communicates inside, such as a backward pass."""
    try:
        yield
    except RuntimeError as error:
        if any(sign in str(error).lower() for sign in PEER_SIGNS):
            raise CollectiveError(f"the gradient exchange failed: {error}") from error
        raise
