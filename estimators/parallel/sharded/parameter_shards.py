"""The slices of a network's parameters that one rank's optimizer updates.

Invariant: a slice shares the parameter's memory, so a step on slices is a step on the network.
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
from ringspark.estimators.parallel.sharded.shard_layout import (
    ParameterSlice,
    even_layout,
    fill_buckets,
    whole_layout,
)

# Optimizers whose state of an element depends only on that element's value and gradient, so a parameter may
# be split anywhere. Listed by class, because a user's factory may make one.
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
    """Whether parameters may be split at any element, by `ELEMENTWISE` or the class's `is_elementwise`."""
    return type(optimizer) in ELEMENTWISE or getattr(type(optimizer), "is_elementwise", False)


class ShardedParameters:
    """The parameters of an optimizer, sharded over ranks.

    Attributes:
        names: Names of the parameters; `parameters` and all indices follow this order.
        strides: Strides of each parameter when it was sharded; optimizer state and gradients keep them.
        held: The optimizer's tensor for each slice of this rank.
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        collective: Collective,
        bucket_bytes: int = BUCKET_BYTES,
        wants: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """Replaces the optimizer's parameters by this rank's slices, if `wants` returns True for them."""
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
        self._slices = [list(bucket.slices()) for bucket in self.buckets]
        self.mine = [[p for p in slices if p.rank == collective.rank] for slices in self._slices]
        self.held: dict[ParameterSlice, torch.Tensor] = {
            piece: nn.Parameter(self._elements(piece)) if self.is_even else self.parameters[piece.index]
            for slices in self.mine
            for piece in slices
        }
        self._addresses = [parameter.data_ptr() for parameter in self.parameters]
        self.strides = [parameter.stride() for parameter in self.parameters]
        _replace_parameters(optimizer, self.parameters, self.held)

    @torch.no_grad()
    def follow_memory(self) -> None:
        """Points the slices to their parameters' memory again: an RNN's `flatten_parameters()` moves it."""
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

    def slices_of(self, rank: int) -> dict[int, ParameterSlice]:
        return {piece.index: piece for slices in self._slices for piece in slices if piece.rank == rank}

    def owners(self, index: int) -> list[ParameterSlice]:
        return [piece for slices in self._slices for piece in slices if piece.index == index]

    def flat_gradients(self, bucket: int) -> tuple[torch.Tensor, list[int]]:
        """Moves a bucket's gradients into a tensor; returns (tensor, indices of the parameters moved)."""
        slots, present = self.buckets[bucket].slots, []
        like = self.parameters[slots[0].index]
        buffer = torch.zeros(self.buckets[bucket].num_elements, dtype=like.dtype, device=like.device)
        for slot in slots:
            parameter = self.parameters[slot.index]
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            present.append(slot.index)
            view_at(buffer, slot.start, parameter.shape, self.strides[slot.index]).copy_(gradient)
        return buffer, present

    def set_gradients(self, bucket: int, part: torch.Tensor, had: Sequence[float]) -> None:
        """Sets the gradients of this rank's slices to views of `part`, the rank's part of a bucket's sum."""
        for piece in self.mine[bucket]:
            tensor = self.held[piece]
            if not had[piece.index]:
                tensor.grad = None
            elif self.is_even:
                tensor.grad = part[piece.offset : piece.offset + tensor.numel()]
            else:
                tensor.grad = view_at(part, piece.offset, tensor.shape, self.strides[piece.index])

    @torch.no_grad()
    def all_gather(self, bucket: int) -> None:
        counts, rank = self.buckets[bucket].counts, self.collective.rank
        like = self.parameters[self.buckets[bucket].slots[0].index]
        own = torch.zeros(counts[rank], dtype=like.dtype, device=like.device)
        for piece in self.mine[bucket]:
            own[piece.offset : piece.offset + piece.stop - piece.start] = self._elements(piece)
        parts = self.collective.all_gather(own, counts)
        for piece in self._slices[bucket]:
            if piece.rank != rank:
                elements = self._elements(piece)
                elements.copy_(parts[piece.rank][piece.offset : piece.offset + len(elements)])

    def _elements(self, piece: ParameterSlice) -> torch.Tensor:
        return flatten_memory(self.parameters[piece.index].data)[piece.start : piece.stop]


def flatten_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of a dense tensor's elements in memory order, also for channels-last weights."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def view_at(buffer: torch.Tensor, start: int, shape: torch.Size, strides: tuple[int, ...]) -> torch.Tensor:
    return buffer.as_strided(shape, strides, buffer.storage_offset() + start)


def is_dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _replace_parameters(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.Tensor],
    held: dict[ParameterSlice, torch.Tensor],
) -> None:
    """Replaces these parameters of an optimizer by this rank's slices; groups and settings stay.

    State that the constructor made, such as Adagrad's accumulators, is sliced like the parameters.
    """
    by_index: dict[int, list[tuple[ParameterSlice, torch.Tensor]]] = {}
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
                        key: slice_state(value, parameter, piece, tensor) for key, value in state.items()
                    }
        # In place, because a wrapper around an optimizer usually shares the list.
        group["params"][:] = own


def slice_state(value: Any, parameter: torch.Tensor, piece: ParameterSlice, tensor: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if tensor is parameter or value.shape != parameter.shape:
        return value.clone()
    aligned = torch.empty_like(parameter, dtype=value.dtype)
    aligned.copy_(value)
    return flatten_memory(aligned)[piece.start : piece.stop].clone()


@contextmanager
def hide_empty_groups(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Hides groups without a slice on this rank during a step, because some optimizers reject them."""
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
    """Raises ValueError if the optimizer needs whole parameters, of which `sync` gives it only slices."""
    if not is_elementwise(optimizer):
        raise ValueError(
            f"sync={sync!r} splits parameters at any element, but optimizer "
            f"{type(optimizer).__name__} needs whole parameters; take one of "
            f"{', '.join(sorted(kind.__name__ for kind in ELEMENTWISE))}, or set sync=AllReduce()"
        )
