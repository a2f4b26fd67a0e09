"""Counts the computation and memory traffic of operators, to predict their time on any machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

# Operators that compute nothing.
VIEWS = frozenset(
    {"view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze"}
    | {"split", "split_with_sizes", "unbind", "alias", "detach", "as_strided", "unfold", "_reshape_alias"}
    | {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh"}
)
# Matrix products per attention call on the CPU; torch counts only GPU kernels.
_ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu": 2,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 5,
}


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


class OperatorMode(TorchDispatchMode):
    """Calls `see` after every operator that runs while this mode is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def see(self, packet: Any, args: tuple[Any, ...], given: dict[str, Any], result: Any) -> None:
        raise NotImplementedError

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.see(func._overloadpacket, args, kwargs or {}, result)
        return result


class WorkCount(OperatorMode):  # type: ignore[no-untyped-call]
    """Counts the work of all operators."""

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


def count_flops(packet: Any, args: tuple[Any, ...], given: dict[str, Any], result: Any) -> int | None:
    """Returns the floating-point operations of a matrix product or similar; None for other operators."""
    if packet.__name__ in _ATTENTION:
        # The backward pass has the gradient in front of queries, keys and values.
        query, key = args[1:3] if packet.__name__.endswith("backward") else args[:2]
        rows, heads, queries, dim = query.shape
        return int(_ATTENTION[packet.__name__] * 2 * rows * heads * queries * key.shape[-2] * dim)
    return int(flop_registry[packet](*args, **given, out_val=result)) if packet in flop_registry else None


def _bytes(tensor: torch.Tensor) -> int:
    # An expanded tensor is read from less memory than it has elements.
    if tensor.layout is not torch.strided:
        return 0
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
