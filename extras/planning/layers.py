"""Counts each layer's work and depth in one forward pass on meta tensors.

Work is the number of operations. Depth is the length of the longest chain of operations that depend on each
other. Work / depth is the largest number of processors that can be useful. Source: Ben-Nun and Hoefler 2019,
"Demystifying Parallel and Distributed Deep Learning".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ringspark.extras.planning.work import VIEWS, OperatorMode, count_flops, tensors_in
from ringspark.models.meta_device import copy_to_meta

# Operations that count as nothing.
_FREE = VIEWS | {"arange", "zeros", "ones", "full", "clone", "_to_copy"}


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """Work and depth of one layer in one forward pass.

    Attributes:
        name: Name in the network; "" for operations outside of the layers.
        work: Number of operations, over all rows.
        depth: Number of operations in the layer's longest chain of dependent operations.
        parameters: Number of trained values.
    """

    name: str
    kind: str
    work: int
    depth: int
    parameters: int


@dataclass(frozen=True, kw_only=True)
class NetworkWork:
    """Work and depth of all layers, and the depth of the whole network.

    If the network branches, its depth is less than the sum of its layers' depths.
    """

    layers: tuple[LayerWork, ...]
    depth: int

    @property
    def work(self) -> int:
        """Number of operations of one forward pass."""
        return sum(layer.work for layer in self.layers)


class _Count(OperatorMode):  # type: ignore[no-untyped-call]
    """Tracks each tensor's depth, and adds an operation's work to the innermost layer that is running."""

    def __init__(self) -> None:
        super().__init__()
        self.running = [""]
        self.work: dict[str, int] = {}
        self.spans: dict[str, tuple[int, int]] = {}
        self.depth = 0
        self._depths: dict[int, int] = {}
        # Keeps storages alive, so that no two have the same address.
        self._alive: list[Any] = []

    def see(self, packet: Any, args: tuple[Any, ...], given: dict[str, Any], result: Any) -> None:
        taken, made = tensors_in((args, given)), tensors_in(result)
        if not made:
            return
        work, steps = 0, 0
        if packet.__name__ not in _FREE:
            work, steps = _cost(count_flops(packet, args, given, result), taken, made)
        start = max((self._depths.get(_key(t), 0) for t in taken), default=0)
        for tensor in made:
            self._alive.append(tensor)
            self._depths[_key(tensor)] = max(self._depths.get(_key(tensor), 0), start + steps)
        layer = self.running[-1]
        self.work[layer] = self.work.get(layer, 0) + work
        if steps:
            first, last = self.spans.get(layer, (start, start))
            self.spans[layer] = min(first, start), max(last, start + steps)
        self.depth = max(self.depth, start + steps)


def _cost(flops: int | None, taken: list[torch.Tensor], made: list[torch.Tensor]) -> tuple[int, int]:
    """Returns work and depth of one operation."""
    elements = sum(t.numel() for t in made)
    if flops is not None:
        # Each element is a sum of products: two operations per term, and 1 + log2 of the terms in depth.
        return flops, 1 + _log(flops // (2 * max(1, made[0].numel())))
    most = max((t.numel() for t in taken), default=elements)
    if most > elements > 0:
        return most, _log(most // elements)  # a reduction
    return elements, 1


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _log(terms: int) -> int:
    return math.ceil(math.log2(max(1, terms)))


def count_layers(module: nn.Module, inputs: Sequence[torch.Tensor]) -> NetworkWork:
    """Counts the operations of `module(*inputs)`, run on copies of module and inputs on `meta`."""
    copy = copy_to_meta(module).to("meta").train()
    count = _Count()
    for name, layer in copy.named_modules():
        layer.register_forward_pre_hook(lambda *_, own=name: count.running.append(own))
        layer.register_forward_hook(lambda *_: count.running.pop() and None)
    given = [t.to("meta") for t in inputs]
    with count:
        copy(*given)
    layers = []
    for name, (first, last) in count.spans.items():
        layer, work = copy.get_submodule(name), count.work[name]
        trained = sum(p.numel() for p in layer.parameters(recurse=False) if p.requires_grad)
        kind, depth = type(layer).__name__, last - first
        if work:
            layers.append(LayerWork(name=name, kind=kind, work=work, depth=depth, parameters=trained))
    return NetworkWork(layers=tuple(layers), depth=count.depth)
