"""Counts the bytes of live tensors, by their purpose, while a step runs on fake tensors.

A fake tensor has a shape, a dtype, a device and a storage of the right size, but no memory. The meter sees
the results of every operator and the release of every storage, so its sum is what an allocator would hold:
including autograd's saved tensors, autocast's casts and an optimizer's temporaries.

Invariant: a storage counts once, however many tensors share it, until its last tensor is released.

No dispatch mode sees scratch memory inside operators. The only scratch as big as activations is estimated: a
CPU convolution whose oneDNN does not support the dtype (16 bits without AVX-512) unfolds its input into
columns, kernel size times the input. torch tells which backend it would choose.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# "activations" includes all tensors without another purpose.
PARTS = ("parameters", "gradients", "optimizer_state", "activations", "batch", "communication")
# Gradients that were moved into a bucket. A weighting without an entry counts them among "gradients".
SENT = "sent"

Weights = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The highest number of bytes under one weighting, and its parts at that moment."""

    total: int
    parts: dict[str, int]

    def with_parts(self, **parts: int) -> Peak:
        """Returns the moment with other numbers of bytes of some parts."""
        merged = {**self.parts, **parts}
        return Peak(total=sum(merged.values()), parts=merged)


class Meter(TorchDispatchMode):
    """Counts the live bytes of every part, and the highest sum under each of several weightings.

    A weighting is the share of each part that one rank holds. With one weighting per type of sharding, one
    run of the step serves them all, although their peaks come at different moments.
    """

    def __init__(self, weightings: Mapping[str, Weights]) -> None:
        """Args: weightings: Name -> part -> share of one rank; a part without an entry counts in full."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._weightings = {}
        for name, weights in weightings.items():
            as_gradients = {SENT: weights.get("gradients", 1.0)}
            self._weightings[name] = dict.fromkeys(PARTS, 1.0) | as_gradients | dict(weights)
        self.live = dict.fromkeys((*PARTS, SENT), 0)
        # By the storage's address, which is reused only after the release has removed the entry.
        self._held: dict[int, _Held] = {}
        self.answers_scalars = False
        self.restart()

    def restart(self) -> None:
        """Resets the peaks, but not the live tensors."""
        self.peaks = {name: Peak(total=0, parts={}) for name in self._weightings}
        self.highest = dict.fromkeys(PARTS, 0)
        self._note()

    def assign(self, tensors: Iterable[torch.Tensor], part: str) -> None:
        """Moves tensors to a part, and adds tensors that the meter has not seen before."""
        for tensor in tensors:
            for storage in _storages(tensor):
                held = self._held.get(storage._cdata)
                if held is None:
                    self._add(storage, part)
                elif held.part != part:
                    self.live[held.part] -= held.num_bytes
                    self.live[part] += held.num_bytes
                    held.part = part
        self._note()

    def assign_new(self, before: set[int], part: str) -> None:
        """Moves all storages that were allocated after `snapshot` to a part."""
        for key, held in self._held.items():
            if key not in before and held.part == "activations":
                self.live["activations"] -= held.num_bytes
                self.live[part] += held.num_bytes
                held.part = part
        self._note()

    def snapshot(self) -> set[int]:
        """Returns the keys of the live storages."""
        return set(self._held)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.answers_scalars and func is torch.ops.aten._local_scalar_dense.default:
            # An optimizer reads its step count or a norm. The number changes no sizes, but the optimizer may
            # divide by it or by its difference from 1.
            return 1.5 if args[0].is_floating_point() else 1
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                for storage in _storages(leaf):
                    if storage._cdata not in self._held:
                        self._add(storage, "activations")
                        self._note()
        if scratch := _scratch_bytes(func, args, result):
            self.live["activations"] += scratch
            self._note()
            self.live["activations"] -= scratch
        return result

    def _add(self, storage: torch.UntypedStorage, part: str) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        reference = weakref.ref(storage, self._releaser(key))
        self._held[key] = _Held(reference=reference, num_bytes=num_bytes, part=part)
        self.live[part] += num_bytes

    def _releaser(self, key: int) -> Callable[[object], None]:
        # A weak reference, because a failed step must not keep the meter alive.
        meter = weakref.ref(self)

        def release(_: object) -> None:
            if (mine := meter()) is not None and (held := mine._held.pop(key, None)) is not None:
                mine.live[held.part] -= held.num_bytes

        return release

    def _note(self) -> None:
        for name, weights in self._weightings.items():
            total = sum(n * weights[part] for part, n in self.live.items())
            if total > self.peaks[name].total:
                parts = {part: int(n * weights[part]) for part, n in self.live.items()}
                parts["gradients"] += parts.pop(SENT)
                self.peaks[name] = Peak(total=sum(parts.values()), parts=parts)
        for part in PARTS:
            sent = self.live[SENT] if part == "gradients" else 0
            self.highest[part] = max(self.highest[part], self.live[part] + sent)


@dataclass(kw_only=True)
class _Held:
    reference: weakref.ref[torch.UntypedStorage]
    num_bytes: int
    part: str


def _storages(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    if tensor.layout is torch.strided:
        return [tensor.untyped_storage()]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices().untyped_storage(), tensor._values().untyped_storage()]
    return []


# Backends that unfold their input.
_COLUMNS = ("Slow2d", "Slow3d")


def _scratch_bytes(func: Any, args: tuple[Any, ...], result: Any) -> int:
    """Returns the bytes that `func` allocates besides its results and releases before it returns."""
    count = _SCRATCH.get(func)
    return count(args, result) if count is not None else 0


def _convolution(args: tuple[Any, ...], result: Any) -> int:
    values, weight, bias, stride, padding, dilation, transposed, output_padding, groups = args[:9]
    bias_sizes = list(bias.shape) if bias is not None else None
    options = (stride, padding, dilation, transposed, output_padding, groups, bias_sizes)
    return _columns(values, weight, bias, options, result.shape)


def _convolution_backward(args: tuple[Any, ...], result: Any) -> int:
    gradient, values, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups = (
        args[:10]
    )
    options = (stride, padding, dilation, transposed, output_padding, groups, bias_sizes)
    return _columns(values, weight, None, options, gradient.shape)


def _columns(
    values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, options: Any, output: torch.Size
) -> int:
    backend = torch._C._select_conv_backend(values, weight, bias, *options)
    kernel = weight.shape[2:]
    if backend.name not in _COLUMNS or math.prod(kernel) == 1:
        return 0
    # (rows, channels of a group * kernel, output positions); the groups run one after another.
    return values.shape[0] * math.prod(weight.shape[1:]) * math.prod(output[2:]) * values.element_size()


_SCRATCH: dict[Any, Callable[[tuple[Any, ...], Any], int]] = {
    torch.ops.aten.convolution.default: _convolution,
    torch.ops.aten.convolution_backward.default: _convolution_backward,
}
