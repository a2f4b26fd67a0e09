"""What one rank holds of a network's parameters, as the optimizer and the other ranks see it.

Invariant: a piece of a parameter shares the parameter's memory, so a step on the pieces is a step on the
network, and what a rank receives for the others' pieces it writes where the network reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel.sharded.shard_layout import (
    BUCKET_BYTES,
    Bucket,
    Piece,
    even_layout,
    fill_buckets,
    whole_layout,
)

# Of these, each number of the state depends on its own parameter and gradient alone, so a parameter may be
# cut anywhere. By class and not by name: a factory of the user's may well make one of them.
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


class Shard:
    """The parameters of an optimizer, dealt out to the ranks.

    Attributes:
        names: Of the parameters; `parameters` and all indices are in this order.
        held: For each piece of this rank: the tensor that its optimizer holds.
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        collective: Collective,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        in_optimizer = {p for group in optimizer.param_groups for p in group["params"]}
        # The backward pass finishes the last layers' gradients first.
        named = [(n, p) for n, p in network.named_parameters() if p in in_optimizer][::-1]
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self._collective = collective
        self.is_even = type(optimizer) in ELEMENTWISE
        for parameter in self.parameters:
            if not _is_dense(parameter):
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
        _narrow(optimizer, self.parameters, self.held)

    def _hold(self, piece: Piece) -> torch.Tensor:
        parameter = self.parameters[piece.index]
        if not self.is_even:
            return parameter
        return nn.Parameter(flat(parameter.data)[piece.start : piece.stop])

    def owners(self, index: int) -> list[Piece]:
        """The pieces of a parameter, by rank; an empty parameter has none."""
        return [piece for pieces in self._pieces for piece in pieces if piece.index == index]

    def flat_gradients(self, bucket: int) -> tuple[torch.Tensor, list[int]]:
        """Moves a bucket's gradients into one tensor; those that are None count as zeros.

        Returns:
            The tensor, with the padding; and the indices of the parameters that had a gradient.
        """
        slots, present = self.buckets[bucket].slots, []
        like = self.parameters[slots[0].index]
        buffer = torch.zeros(self.buckets[bucket].num_elements, dtype=like.dtype, device=like.device)
        for slot in slots:
            parameter = self.parameters[slot.index]
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            if gradient.layout != torch.strided:
                raise ValueError(
                    f"parameter {self.names[slot.index]!r} got a sparse gradient, which sharding cannot cut; "
                    "make its layer with sparse=False, or set sharding='none'"
                )
            present.append(slot.index)
            _place(buffer, slot.start, parameter).copy_(gradient)
        return buffer, present

    def set_gradients(self, bucket: int, part: torch.Tensor, had: Sequence[float]) -> None:
        """Gives this rank's pieces their gradients, without a copy.

        Args:
            part: This rank's range of the bucket.
            had: For each parameter, how many ranks had a gradient.
        """
        for piece in self.mine[bucket]:
            tensor = self.held[piece]
            if not had[piece.index]:
                tensor.grad = None
            elif self.is_even:
                tensor.grad = part[piece.offset : piece.offset + tensor.numel()]
            else:
                tensor.grad = _place(part, piece.offset, tensor)

    @torch.no_grad()
    def share(self, bucket: int) -> None:
        """Gives the present numbers of every rank's pieces of a bucket to all. Runs on every rank."""
        counts, rank = self.buckets[bucket].counts, self._collective.rank
        like = self.parameters[self.buckets[bucket].slots[0].index]
        own = torch.zeros(counts[rank], dtype=like.dtype, device=like.device)
        for piece in self.mine[bucket]:
            own[piece.offset : piece.offset + piece.stop - piece.start] = self._elements(piece)
        parts = self._collective.all_gather(own, counts)
        for piece in self._pieces[bucket]:
            if piece.rank != rank:
                elements = self._elements(piece)
                elements.copy_(parts[piece.rank][piece.offset : piece.offset + len(elements)])

    def _elements(self, piece: Piece) -> torch.Tensor:
        return flat(self.parameters[piece.index].data)[piece.start : piece.stop]


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in the order of its memory, as a view: also of channels-last weights."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def unflat(elements: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse of `flat`: a view of `elements` in the shape of `like`."""
    return _place(elements, 0, like)


def _place(buffer: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """The elements of a flat buffer from `start` on, as a view with shape and strides of `like`."""
    return buffer.as_strided(like.shape, like.stride(), buffer.storage_offset() + start)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one range of memory, in whatever order."""
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
    """Leaves an optimizer over whole parameters with what this rank holds of them.

    Its groups and their settings stay. What its constructor put into the state (Adagrad's first
    accumulator) is cut like the parameters.
    """
    by_index: dict[int, list[tuple[Piece, torch.Tensor]]] = {}
    for piece, tensor in held.items():
        by_index.setdefault(piece.index, []).append((piece, tensor))
    index_of = {parameter: index for index, parameter in enumerate(parameters)}
    for group in optimizer.param_groups:
        own: list[torch.Tensor] = []
        for parameter in group["params"]:
            state: dict[str, Any] | None = optimizer.state.pop(parameter, None)
            for piece, tensor in by_index.get(index_of[parameter], []):
                own.append(tensor)
                if state:
                    optimizer.state[tensor] = {
                        key: cut(value, parameter, piece, tensor) for key, value in state.items()
                    }
        # In place: a wrapper around an optimizer as a rule shares the list.
        group["params"][:] = own


def cut(value: Any, parameter: torch.Tensor, piece: Piece, tensor: torch.Tensor) -> Any:
    """A state's value for a piece: its own elements where it has one for each, else the value itself."""
    if not isinstance(value, torch.Tensor):
        return value
    if tensor is parameter or value.shape != parameter.shape:
        return value.clone()
    aligned = torch.empty_like(parameter, dtype=value.dtype)
    aligned.copy_(value)
    return flat(aligned)[piece.start : piece.stop].clone()


__all__ = ["ELEMENTWISE", "Bucket", "Piece", "Shard", "cut", "flat", "unflat"]
