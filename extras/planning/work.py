"""Counts the work of operators, to predict their time on any machine, and the work and depth of layers.

Depth is the length of the longest chain of operations that depend on each other. Work / depth is the largest
number of processors that can be useful. Source: Ben-Nun and Hoefler 2019, "Demystifying Parallel and
Distributed Deep Learning".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ringspark.estimators.training.observation.epoch_meter import OperatorMode, count_flops
from ringspark.models.meta_device import copy_to_meta

# Operators that compute nothing.
VIEWS = frozenset(
    {"view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze"}
    | {"split", "split_with_sizes", "unbind", "alias", "detach", "as_strided", "unfold", "_reshape_alias"}
    | {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh"}
)
# Operators that count as nothing in a layer.
_FREE = VIEWS | {"arange", "zeros", "ones", "full", "clone", "_to_copy"}


@dataclass(frozen=True, kw_only=True)
class Work:
    """Work of one or several operators.

    Attributes:
        launches: Number of operators that compute something.
        flops: Floating-point operations of matrix products and similar operators.
        num_bytes: Bytes that operators read and write.
    """

    launches: int = 0
    flops: int = 0
    num_bytes: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            launches=self.launches + other.launches,
            flops=self.flops + other.flops,
            num_bytes=self.num_bytes + other.num_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class OperatorRates:
    """Speed of one rank that has a core or a device to itself.

    Attributes:
        launch: Seconds per operator.
        flop: Seconds per floating-point operation of a matrix product.
        byte: Seconds per byte that an operator reads or writes.
    """

    launch: float
    flop: float
    byte: float

    def seconds(self, work: Work) -> float:
        return work.launches * self.launch + self.rest(work)

    def rest(self, work: Work) -> float:
        """Returns the part of the time that grows with the rows: everything except launching operators."""
        return work.flops * self.flop + work.num_bytes * self.byte

    def fit(self, measured: Mapping[float, tuple[Work, float]]) -> OperatorRates:
        """Fits the rates to the smallest and largest step; `measured` maps rows to (work, seconds).

        The ratio of `flop` and `byte` stays the same, because two steps are too few to separate them.
        """
        (few, quick), (many, slow) = measured[min(measured)], measured[max(measured)]
        grown = self.rest(many) - self.rest(few)
        scale = (slow - quick) / grown if grown > 0 else 0.0
        launch = (slow - scale * self.rest(many)) / many.launches
        if scale <= 0 or launch < 0:
            # Noise, or cache misses of the larger step: assume no launch time.
            scale, launch = slow / self.rest(many), 0.0
        return replace(self, launch=launch, flop=self.flop * scale, byte=self.byte * scale)


# Assumed for one core of a server without a measurement: 50 GFLOP/s and 10 GB/s.
ASSUMED = OperatorRates(launch=5e-6, flop=2e-11, byte=1e-10)


class WorkCount(OperatorMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()
        self._work = Work()

    def take(self) -> Work:
        """Returns the work since the last call."""
        found, self._work = self._work, Work()
        return found

    def see(self, packet: Any, args: tuple[Any, ...], given: dict[str, Any], result: Any) -> None:
        if packet.__name__ not in VIEWS:
            num_bytes = sum(map(_bytes, tensors_in((args, given, result))))
            flops = count_flops(packet, args, given, result) or 0
            self._work += Work(launches=1, flops=flops, num_bytes=num_bytes)


def tensors_in(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _bytes(tensor: torch.Tensor) -> int:
    # An expanded tensor is read from less memory than it has elements.
    if tensor.layout is not torch.strided:
        return 0
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


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
