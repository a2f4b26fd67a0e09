"""What a rank needs from the others, whatever carries the bytes.

A collective has two halves. `open_rendezvous` runs on rank 0 before anybody is connected and
returns the address that the gang hands to every rank; `connect` then joins. One process holds
at most one connected collective at a time.

Invariant: every rank makes the same sequence of calls. A rank that fails calls `abort`, which
makes the calls that its peers wait in end as `CollectiveError` instead of hanging.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import nn

ReduceOp = Literal["sum", "max", "min"]


class CollectiveError(RuntimeError):
    """A collective operation failed, as a rule because a peer did: never the root cause itself."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """One rank's place in the gang; ranks on one host are neighbours."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    host: str = "127.0.0.1"


class Rendezvous(Protocol):
    """The meeting point that rank 0 keeps open until the gang has closed."""

    @property
    def address(self) -> str:
        """`host:port`, reachable from every rank."""

    def close(self) -> None:
        """Frees the port."""


class GradientSync(Protocol):
    """One module and its optimizer, kept equal on all ranks.

    The loss that is differentiated on each rank is its share of the global batch's mean, times
    `loss_factor`; after `reduce` the gradients of every rank are those of the whole mean. A parameter
    that got a gradient on no rank keeps None, as on one rank, so that no optimizer decays or moves it.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    loss_factor: float

    def backward_without_rows(self) -> None:
        """Takes part in the exchange of a step in which this rank has no rows."""

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """Around the forward and backward pass of one micro-batch; only the last communicates."""

    def reduce(self) -> None:
        """Waits until the gradients of this step are summed over all ranks."""

    def step(self, scaler: torch.amp.GradScaler) -> None:
        """Takes the optimizer step on reduced gradients."""


class Collective(Protocol):
    """The operations that training uses. All of them block, and run on every rank."""

    name: str
    member: Member

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def bytes_sent(self) -> int:
        """Payload that this rank has sent so far, by the ring's count: see `Traffic`."""

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        """Returns the reduction of `tensor` over all ranks, in its dtype and on its device."""

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Returns every rank's tensor, in the order of ranks.

        Args:
            tensor: 1-D; ranks may give different lengths, also none, but one dtype and device type.
        """

    def broadcast(self, tensors: list[torch.Tensor], root: int = 0) -> None:
        """Overwrites `tensors` in place by those of rank `root`."""

    def barrier(self) -> None:
        """Returns once every rank is here."""

    def synchronize(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: int
    ) -> GradientSync:
        """Ties a module's gradients together over the ranks; the weights must be equal already."""

    def close(self) -> None:
        """Leaves in good order: every rank calls it after its last operation."""

    def abort(self) -> None:
        """Leaves at once after a failure, so that the peers' pending calls end in an error."""


class Traffic:
    """Counts the bytes that a rank sends, as the ring algorithms send them.

    The count is the algorithm's, not the network card's: headers, rendezvous and barriers are left
    out, and a library that picks a tree for small tensors sends as much in sum over the ranks. In a
    ring of N ranks, one rank sends

    - all_reduce of n bytes: 2 (N - 1) / N * n (Patarasuk and Yuan 2009), for the gradients of a step
      as for any tensor;
    - all_gather: its own piece and those it passes on, each of the N - 1 times a piece moves;
    - broadcast of n bytes: n, but nothing by the last rank of the ring, the one before the root.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self.bytes_sent = 0

    def all_reduce(self, num_bytes: int) -> None:
        size = self._member.size
        self.bytes_sent += 2 * (size - 1) * num_bytes // size

    def all_gather(self, pieces: list[int]) -> None:
        """Args: pieces: Bytes of each rank's piece."""
        # All but its successor's, which has come around the whole ring when it arrives here.
        self.bytes_sent += sum(pieces) - pieces[(self._member.rank + 1) % self._member.size]

    def broadcast(self, num_bytes: int, root: int) -> None:
        if (self._member.rank + 1) % self._member.size != root:
            self.bytes_sent += num_bytes


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


class PlainSync:
    """`GradientSync` without communication: the base of the others."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module = module
        self.optimizer = optimizer
        self.loss_factor = 1.0

    def backward_without_rows(self) -> None:
        return

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def reduce(self) -> None:
        return

    def step(self, scaler: torch.amp.GradScaler) -> None:
        scaler.step(self.optimizer)


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
PEER_SIGNS = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "horovod")


@contextmanager
def backward_errors() -> Iterator[None]:
    """Like `peer_errors` for code of the user's that communicates inside, such as a backward pass."""
    try:
        yield
    except RuntimeError as error:
        if any(sign in str(error).lower() for sign in PEER_SIGNS):
            raise CollectiveError(f"the gradient exchange failed: {error}") from error
        raise
