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
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import nn

from ringspark.estimators.training.optimizer_state import OptimizerState, load_by_name, state_by_name

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


class Scaler(Protocol):
    """Decides whether a step is taken: `LossScaler`, or torch's GradScaler."""

    def step(self, optimizer: torch.optim.Optimizer) -> object:
        """Lets the optimizer take its step, unless its gradients overflowed."""


class GradientSync(Protocol):
    """One module and its optimizer, kept equal on all ranks.

    The loss that is differentiated on each rank is its share of the global batch's mean, times
    `loss_factor`; after `reduce` the gradients that the optimizer of a rank sees, all of them or the part
    that a sharding leaves to it, are those of the whole mean. A parameter that got a gradient on no rank
    keeps None, as on one rank, so that no optimizer decays or moves it.

    Attributes:
        module: To call in training, with whatever wrapper the exchange needs.
        network: Without that wrapper; its names are those of the state dict.
    """

    module: nn.Module
    network: nn.Module
    optimizer: torch.optim.Optimizer
    loss_factor: float

    def backward_without_rows(self, inputs: Sequence[torch.Tensor] = ()) -> None:
        """Takes part in the exchange of a step in which this rank has no rows.

        Args:
            inputs: The arguments of `module`, of zero rows: what their shapes and dtypes would be.
        """

    def forward_without_rows(self, inputs: Sequence[torch.Tensor]) -> None:
        """Takes part in an evaluation of `network` on a batch of which this rank has no rows."""

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """Around the forward and backward pass of one micro-batch.

        Only the last communicates, unless the rank is to hold no more than its part of the gradients.
        """

    def reduce(self) -> None:
        """Waits until the gradients of this step are summed over all ranks."""

    def clip_gradients(self, max_norm: float) -> None:
        """Scales reduced gradients so that the 2-norm of all of them together is at most `max_norm`."""

    def gradients(self) -> list[torch.Tensor]:
        """The gradients that this rank holds at the moment."""

    def step(self, scaler: Scaler) -> None:
        """Takes the optimizer step on reduced gradients."""

    def optimizer_state(self) -> OptimizerState:
        """The whole optimizer state by parameter name, complete on rank 0. Runs on every rank."""

    def load_optimizer_state(self, state: OptimizerState) -> None:
        """Takes over this rank's part of a whole optimizer state, of any number of ranks and sharding."""


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
    - reduce_scatter: a partial sum of every part but its own;
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

    def reduce_scatter(self, parts: list[int]) -> None:
        """Args: parts: Bytes of each rank's part."""
        self.bytes_sent += sum(parts) - parts[self._member.rank]

    def broadcast(self, num_bytes: int, root: int) -> None:
        if (self._member.rank + 1) % self._member.size != root:
            self.bytes_sent += num_bytes


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


class PlainSync:
    """`GradientSync` without communication: the base of the others."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module = module
        self.network = module
        self.optimizer = optimizer
        self.loss_factor = 1.0

    def backward_without_rows(self, inputs: Sequence[torch.Tensor] = ()) -> None:
        return

    def forward_without_rows(self, inputs: Sequence[torch.Tensor]) -> None:
        return

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def reduce(self) -> None:
        return

    def clip_gradients(self, max_norm: float) -> None:
        # Of the parameters that are trained: others may keep gradients, which differ by rank.
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(trained, max_norm)

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.network.parameters() if p.grad is not None]

    def step(self, scaler: Scaler) -> None:
        scaler.step(self.optimizer)

    def optimizer_state(self) -> OptimizerState:
        return state_by_name(self.network, self.optimizer)

    def load_optimizer_state(self, state: OptimizerState) -> None:
        load_by_name(self.network, self.optimizer, state)


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
