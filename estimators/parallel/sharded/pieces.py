"""The pieces of a network's parameters that one rank holds, as the optimizer and the other ranks see them.

Invariant: a piece of a parameter shares the parameter's memory. So a step on the pieces is a step on the
network, and a rank writes the received pieces of others directly where the network reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.options.sync import Sync
from ringspark.estimators.parallel.data.gradient_buckets import BUCKET_BYTES
from ringspark.estimators.parallel.sharded.shard_layout import Piece, even_layout, fill_buckets, whole_layout

# Optimizers in which each element of the state depends only on its own parameter and gradient, so that a
# parameter may be cut anywhere. They are listed by class instead of name, as a user's factory may make one.
ELEMENTWISE: frozenset[type[torch.optim.Optimizer]] = frozenset(
    (
        torch.optim.SGD,
        torch.optim.ASGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
    )
)


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a parameter may be cut anywhere; a class of our own says so itself."""
    return type(optimizer) in ELEMENTWISE or getattr(type(optimizer), "is_elementwise", False)


class Shard:
    """The parameters of an optimizer, dealt out to the ranks.

    Attributes:
        names: Names of the parameters; `parameters` and all indices follow this order.
        collective: The ranks.
        strides: Strides of each parameter when it was sharded; optimizer state and gradients keep this order.
        held: Tensor that the optimizer holds, for each piece of this rank.
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        collective: Collective,
        bucket_bytes: int = BUCKET_BYTES,
        wants: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """Deals them out, and leaves the optimizer this rank's pieces.

        Args:
            wants: Whether the parameter called so is among them; the optimizer keeps the others as they are.
        """
        in_optimizer = {p for group in optimizer.param_groups for p in group["params"]}
        # The backward pass finishes the last layers' gradients first.
        known = [(n, p) for n, p in network.named_parameters() if p in in_optimizer]
        named = [(name, parameter) for name, parameter in known if wants(name)][::-1]
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.collective = collective
        self.is_even = is_elementwise(optimizer)
        for parameter in self.parameters:
            if not is_dense(parameter):
                parameter.data = parameter.data.contiguous()
        sizes = [p.numel() for p in self.parameters]
        members = fill_buckets(
            sizes,
            [(p.dtype, p.device) for p in self.parameters],
            [bucket_bytes // p.element_size() for p in self.parameters],
        )
        layout = even_layout if self.is_even else whole_layout
        self.buckets = layout(members, sizes, collective.size)
        self._pieces = [list(bucket.pieces()) for bucket in self.buckets]
        self.mine = [[p for p in pieces if p.rank == collective.rank] for pieces in self._pieces]
        self.held: dict[Piece, torch.Tensor] = {
            piece: self._hold(piece) for pieces in self.mine for piece in pieces
        }
        self._addresses = [parameter.data_ptr() for parameter in self.parameters]
        self.strides = [parameter.stride() for parameter in self.parameters]
        _narrow(optimizer, self.parameters, self.held)

    def _hold(self, piece: Piece) -> torch.Tensor:
        parameter = self.parameters[piece.index]
        if not self.is_even:
            return parameter
        return nn.Parameter(flat(parameter.data)[piece.start : piece.stop])

    @torch.no_grad()
    def follow(self) -> None:
        """Points the pieces to the present memory of their parameters.

        A recurrent layer's `flatten_parameters()`, for example, moves parameters to other memory. A step on a
        piece of the old memory would be lost.
        """
        if not self.is_even:
            return
        for index, (parameter, strides) in enumerate(zip(self.parameters, self.strides, strict=True)):
            if parameter.stride() != strides:
                # The optimizer's state has this order.
                parameter.data = torch.empty_strided(
                    parameter.shape, strides, dtype=parameter.dtype, device=parameter.device
                ).copy_(parameter)
            if parameter.data_ptr() != self._addresses[index]:
                self._addresses[index] = parameter.data_ptr()
                for piece in (piece for piece in self.held if piece.index == index):
                    self.held[piece].data = self._elements(piece)

    def pieces_of(self, rank: int) -> dict[int, Piece]:
        """Returns a rank's piece of each parameter of which it has one, in the order of the buckets."""
        return {piece.index: piece for pieces in self._pieces for piece in pieces if piece.rank == rank}

    def owners(self, index: int) -> list[Piece]:
        """Returns the pieces of a parameter in rank order; an empty parameter has none."""
        return [piece for pieces in self._pieces for piece in pieces if piece.index == index]

    def flat_gradients(self, bucket: int) -> tuple[torch.Tensor, list[int]]:
        """Moves a bucket's gradients into one tensor; a gradient of None counts as zeros.

        Returns:
            The tensor with its padding, and the indices of the parameters that had a gradient.
        """
        slots, present = self.buckets[bucket].slots, []
        like = self.parameters[slots[0].index]
        buffer = torch.zeros(self.buckets[bucket].num_elements, dtype=like.dtype, device=like.device)
        for slot in slots:
            parameter = self.parameters[slot.index]
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            present.append(slot.index)
            place(buffer, slot.start, parameter.shape, self.strides[slot.index]).copy_(gradient)
        return buffer, present

    def set_gradients(self, bucket: int, part: torch.Tensor, had: Sequence[float]) -> None:
        """Gives this rank's pieces their gradients, without a copy.

        Args:
            part: Sum of the gradients in this rank's range of the bucket.
            had: Number of ranks that had a gradient, for each parameter.
        """
        for piece in self.mine[bucket]:
            tensor = self.held[piece]
            if not had[piece.index]:
                tensor.grad = None
            elif self.is_even:
                tensor.grad = part[piece.offset : piece.offset + tensor.numel()]
            else:
                tensor.grad = place(part, piece.offset, tensor.shape, self.strides[piece.index])

    @torch.no_grad()
    def share(self, bucket: int) -> None:
        """Sends the present values of every rank's pieces of a bucket to all ranks. Runs on every rank."""
        counts, rank = self.buckets[bucket].counts, self.collective.rank
        like = self.parameters[self.buckets[bucket].slots[0].index]
        own = torch.zeros(counts[rank], dtype=like.dtype, device=like.device)
        for piece in self.mine[bucket]:
            own[piece.offset : piece.offset + piece.stop - piece.start] = self._elements(piece)
        parts = self.collective.all_gather(own, counts)
        for piece in self._pieces[bucket]:
            if piece.rank != rank:
                elements = self._elements(piece)
                elements.copy_(parts[piece.rank][piece.offset : piece.offset + len(elements)])

    def _elements(self, piece: Piece) -> torch.Tensor:
        return flat(self.parameters[piece.index].data)[piece.start : piece.stop]


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of a dense tensor's elements in memory order, also for channels-last weights."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def place(buffer: torch.Tensor, start: int, shape: torch.Size, strides: tuple[int, ...]) -> torch.Tensor:
    """Returns a view of a flat buffer that begins at `start`."""
    return buffer.as_strided(shape, strides, buffer.storage_offset() + start)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one range of memory, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _narrow(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], held: dict[Piece, torch.Tensor]
) -> None:
    """Replaces these parameters of an optimizer by the pieces that this rank holds.

    The groups and their settings stay. State that the constructor made (Adagrad's first accumulator) is
    cut like the parameters.
    """
    by_index: dict[int, list[tuple[Piece, torch.Tensor]]] = {}
    for piece, tensor in held.items():
        by_index.setdefault(piece.index, []).append((piece, tensor))
    index_of = {parameter: index for index, parameter in enumerate(parameters)}
    for group in optimizer.param_groups:
        own: list[torch.Tensor] = []
        for parameter in group["params"]:
            if parameter not in index_of:
                own.append(parameter)
                continue
            state: dict[str, Any] | None = optimizer.state.pop(parameter, None)
            for piece, tensor in by_index.get(index_of[parameter], []):
                own.append(tensor)
                if state:
                    optimizer.state[tensor] = {
                        key: cut(value, parameter, piece, tensor) for key, value in state.items()
                    }
        # Changed in place, because a wrapper around an optimizer usually shares the list.
        group["params"][:] = own


def cut(value: Any, parameter: torch.Tensor, piece: Piece, tensor: torch.Tensor) -> Any:
    """Returns a state's value for a piece: the piece's elements if it has one for each, else all of it."""
    if not isinstance(value, torch.Tensor):
        return value
    if tensor is parameter or value.shape != parameter.shape:
        return value.clone()
    aligned = torch.empty_like(parameter, dtype=value.dtype)
    aligned.copy_(value)
    return flat(aligned)[piece.start : piece.stop].clone()


@contextmanager
def without_empty_groups(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Hides empty groups during a step: a rank may hold nothing of a group, which some optimizers reject."""
    groups = optimizer.param_groups
    if all(group["params"] for group in groups):
        yield
        return
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        yield
    finally:
        optimizer.param_groups = groups


def check_optimizer(optimizer: torch.optim.Optimizer, sync: Sync) -> None:
    """Refuses an optimizer that needs whole parameters, because each server holds parts of them.

    Raises:
        ValueError: It needs whole parameters.
    """
    if not is_elementwise(optimizer):
        raise ValueError(
            f"sync={sync!r} shards parameters anywhere, and optimizer "
            f"{type(optimizer).__name__} needs whole parameters; take one of "
            f"{', '.join(sorted(kind.__name__ for kind in ELEMENTWISE))}, or set sync=AllReduce()"
        )
