"""Counts the bytes of live tensors, by their purpose, while a step runs on fake tensors.

The meter sees the results of every operator and the release of every storage, so its sum equals the bytes
that an allocator would hold. A storage counts once, even if several tensors share it, until all are released.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
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
    """The moment at which a rank holds most bytes.

    Attributes:
        parts: Bytes of each part, such as weights, at that moment.
        most_activations: Largest number of bytes of activations, which can come at another moment.
    """

    parts: dict[str, int]
    most_activations: int = 0

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def with_parts(self, **parts: int) -> Peak:
        """Returns a copy in which `parts` replace the bytes of some parts."""
        return replace(self, parts={**self.parts, **parts})


class Meter(TorchDispatchMode):
    """Counts the live bytes of every part, and the highest sum under each of several weightings.

    A weighting maps a part to the share that one rank holds; a part without an entry counts in full.
    So one run of a step measures all types of sharding.
    """

    def __init__(self, weightings: Mapping[str, Weights]) -> None:
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
        """Resets the peaks to the live tensors."""
        # Weighting -> the highest sum, and the live bytes at that moment.
        self._highest: dict[str, tuple[float, dict[str, int]]] = dict.fromkeys(self._weightings, (-1.0, {}))
        self._most_activations = 0
        self._update_peaks()

    @property
    def peaks(self) -> dict[str, Peak]:
        """The peak under each weighting since the last restart."""
        found = {}
        for name, (_, live) in self._highest.items():
            parts = {part: int(n * self._weightings[name][part]) for part, n in live.items()}
            parts["gradients"] += parts.pop(SENT)
            found[name] = Peak(parts=parts, most_activations=self._most_activations)
        return found

    def assign(self, tensors: Iterable[torch.Tensor], part: str) -> None:
        """Moves tensors to a part, and adds tensors that the meter has not seen before."""
        for tensor in tensors:
            for storage in _storages(tensor):
                held = self._held.get(storage._cdata)
                if held is None:
                    self._add(storage, part)
                else:
                    self._move(held, part)
        self._update_peaks()

    def assign_new(self, before: set[int], part: str) -> None:
        """Moves the activations that were allocated after the snapshot `before` to a part."""
        for key, held in self._held.items():
            if key not in before and held.part == "activations":
                self._move(held, part)
        self._update_peaks()

    def _move(self, held: _Held, part: str) -> None:
        self.live[held.part] -= held.num_bytes
        self.live[part] += held.num_bytes
        held.part = part

    def snapshot(self) -> set[int]:
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
                        self._update_peaks()
        if scratch := _scratch_bytes(func, args, result):
            self.live["activations"] += scratch
            self._update_peaks()
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

    def _update_peaks(self) -> None:
        for name, weights in self._weightings.items():
            total = sum(n * weights[part] for part, n in self.live.items())
            if total > self._highest[name][0]:
                self._highest[name] = total, dict(self.live)
        self._most_activations = max(self._most_activations, self.live["activations"])


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


def _scratch_bytes(func: Any, args: tuple[Any, ...], result: Any) -> int:
    """Returns the bytes that `func` allocates and releases inside, which no dispatch mode sees.

    Only one operator needs as much scratch memory as its activations take: in a dtype that oneDNN does not
    support (16 bits without AVX-512), a convolution on the CPU unfolds its input into columns.
    """
    if func is torch.ops.aten.convolution.default:
        (values, weight, bias, *options), output = args[:9], result
        bias_sizes = None if bias is None else list(bias.shape)
    elif func is torch.ops.aten.convolution_backward.default:
        output, values, weight, bias_sizes, *options = args[:10]
        bias = None
    else:
        return 0
    backend = torch._C._select_conv_backend(values, weight, bias, *options, bias_sizes)
    if backend.name not in ("Slow2d", "Slow3d") or math.prod(weight.shape[2:]) == 1:
        return 0
    # (rows, channels of a group * kernel, output positions); the groups run one after another.
    columns = values.shape[0] * math.prod(weight.shape[1:]) * math.prod(output.shape[2:])
    return int(columns * values.element_size())
