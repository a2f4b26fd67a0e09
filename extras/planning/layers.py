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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ringspark.models.meta_device import copy_to_meta

# Operations that compute nothing.
_VIEWS = frozenset(
    {"view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze"}
    | {"squeeze", "split", "split_with_sizes", "unbind", "alias", "detach", "as_strided", "unfold"}
    | {"_reshape_alias", "empty", "arange", "lift_fresh", "clone", "_to_copy", "empty_like", "zeros"}
    | {"ones", "full"}
)


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


class _Count(TorchDispatchMode):
    """Tracks each tensor's depth, and adds an operation's work to the innermost layer that is running."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.running = [""]
        self.work: dict[str, int] = {}
        self.spans: dict[str, tuple[int, int]] = {}
        self.depth = 0
        self._depths: dict[int, int] = {}
        # Keeps storages alive, so that no two have the same address.
        self._alive: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        result = func(*args, **given)
        taken = [t for t in tree_leaves((args, given)) if isinstance(t, torch.Tensor)]
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        if not made:
            return result
        work, steps = self._cost(func, args, given, result, taken, made)
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
        return result

    def _cost(
        self, func: Any, args: Any, given: Any, result: Any, taken: list[Any], made: list[Any]
    ) -> tuple[int, int]:
        name = func._overloadpacket.__name__
        if name in _VIEWS:
            return 0, 0
        elements = sum(t.numel() for t in made)
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            work = int(count(*args, **given, out_val=result))
            # Each element is a sum of products: two operations per term, and 1 + log2 of the terms in depth.
            return work, 1 + _log(work // (2 * max(1, made[0].numel())))
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
