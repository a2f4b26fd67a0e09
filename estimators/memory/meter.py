"""Counts the bytes of live tensors, by what they are for, while a step runs on fake tensors.

A fake tensor has a shape, a dtype, a device and a storage of the right size, but no memory behind it.
The meter sees every operator's results and notes when each storage is released, so what it adds up is
what an allocator would hold, autograd's saved tensors, autocast's casts and an optimizer's temporaries
included: they are made by the code that makes them in training.

Invariant: a storage counts once, however many tensors look at it, and from the operator that makes it
to the release of its last tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ringspark.estimators.memory.workspace import scratch_bytes

# What bytes are for. "activations" is the rest: what the backward pass needs, and temporaries.
PARTS = ("parameters", "gradients", "optimizer_state", "activations", "batch", "communication")

Weights = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The moment with the most bytes under one weighting, and what they were for then."""

    total: int
    parts: dict[str, int]


class Meter(TorchDispatchMode):
    """Live bytes of every part, and the highest sum under each of several weightings.

    A weighting says which share of a part one rank holds: with one weighting for every way of sharding,
    one run of the step serves them all, although each has its peak at a moment of its own.
    """

    def __init__(self, weightings: Mapping[str, Weights]) -> None:
        """Args: weightings: Name -> part -> share; parts that are left out count whole."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._weightings = {
            name: [weights.get(part, 1.0) for part in PARTS] for name, weights in weightings.items()
        }
        self._live = dict.fromkeys(PARTS, 0)
        # By the storage's address, which is free again only after the release has removed the entry.
        self._held: dict[int, _Held] = {}
        self.answers_scalars = False
        self.restart()

    def restart(self) -> None:
        """Forgets the peaks so far; what lives goes on living."""
        self._peaks = {name: Peak(total=0, parts={}) for name in self._weightings}
        self.highest = dict(self._live)
        self._note()

    def peak(self, weighting: str) -> Peak:
        return self._peaks[weighting]

    def live(self, part: str) -> int:
        return self._live[part]

    def assign(self, tensors: Iterable[torch.Tensor], part: str) -> None:
        """Says what tensors are for, known to the meter or not."""
        for tensor in tensors:
            for storage in _storages(tensor):
                held = self._held.get(storage._cdata)
                if held is None:
                    self._add(storage, part)
                elif held.part != part:
                    self._live[held.part] -= held.num_bytes
                    self._live[part] += held.num_bytes
                    held.part = part
        self._note()

    def assign_new(self, before: set[int], part: str) -> None:
        """Says what all storages are for that live now and did not at `snapshot`."""
        for key, held in self._held.items():
            if key not in before and held.part == "activations":
                self._live["activations"] -= held.num_bytes
                self._live[part] += held.num_bytes
                held.part = part
        self._note()

    def snapshot(self) -> set[int]:
        """Names of the storages that live now."""
        return set(self._held)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.answers_scalars and func is torch.ops.aten._local_scalar_dense.default:
            # An optimizer's step count or a norm: the sizes of what it makes do not depend on it, but it may
            # divide by the number, or by what is missing to 1.
            return 1.5 if args[0].is_floating_point() else 1
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                for storage in _storages(leaf):
                    if storage._cdata not in self._held:
                        self._add(storage, "activations")
                        self._note()
        if scratch := scratch_bytes(func, args, result):
            self._live["activations"] += scratch
            self._note()
            self._live["activations"] -= scratch
        return result

    def _add(self, storage: torch.UntypedStorage, part: str) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        reference = weakref.ref(storage, self._releaser(key))
        self._held[key] = _Held(reference=reference, num_bytes=num_bytes, part=part)
        self._live[part] += num_bytes

    def _releaser(self, key: int) -> Callable[[object], None]:
        # No reference to the meter from a storage: a failed step must not keep it alive.
        meter = weakref.ref(self)

        def release(_: object) -> None:
            if (mine := meter()) is not None and (held := mine._held.pop(key, None)) is not None:
                mine._live[held.part] -= held.num_bytes

        return release

    def _note(self) -> None:
        live = list(self._live.values())
        for name, weights in self._weightings.items():
            total = sum(n * w for n, w in zip(live, weights, strict=True))
            if total > self._peaks[name].total:
                parts = {p: int(n * w) for p, n, w in zip(PARTS, live, weights, strict=True)}
                self._peaks[name] = Peak(total=sum(parts.values()), parts=parts)
        for part, num_bytes in self._live.items():
            self.highest[part] = max(self.highest[part], num_bytes)


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
