"""Maps a rank's shard of a network to the whole network, for checkpoints and norms.

A rank's parameters have the names of the whole network. Tensors that are not sharded are bitwise equal on all
ranks that have them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ringspark.estimators.collectives.base import gather_bytes
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.parallel.optimizer_state import OptimizerState, StateValue, gather_value
from ringspark.estimators.parallel.shard_spec import (
    CheckpointShards,
    ShardSpec,
    copy_shard,
    join_shards,
    shard_shape,
)

_LAYOUTS: WeakKeyDictionary[nn.Module, ModelLayout] = WeakKeyDictionary()


def layout_of(module: nn.Module) -> ModelLayout | None:
    """Returns the layout of a sharded network, or None if the network is not sharded."""
    return _LAYOUTS.get(module)


@dataclass(frozen=True)
class _Entry:
    shape: tuple[int, ...]
    dtype: str
    holders: tuple[int, ...]


@dataclass(frozen=True)
class CheckpointShare:
    """The tensors that this rank writes to a checkpoint.

    Attributes:
        names: Names of the tensors.
        spreads: By name, the tensors that several ranks write together, each rank one shard.
        total: Number of tensors of the whole network.
    """

    names: frozenset[str]
    spreads: dict[str, CheckpointShards]
    total: int


class ClassShards(Protocol):
    """Logits that are sharded by class over the ranks of a replica."""

    def split_loss(self, loss: Any) -> Any:
        """Returns a `RowLoss` for this rank's logits, if the loss is a plain cross entropy; else `loss`.

        In the first case the network returns only the logits of this rank's classes from now on.
        """

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Gathers the logits of all classes, without gradients. Runs on every rank."""

    def gather_logits(self) -> AbstractContextManager[None]:
        """Returns a context in which every rank gets the logits of all classes."""


class ModelLayout:
    """The layout of one network on one rank.

    Attributes:
        cuts: Sharded parameters; ranks hold the other parameters whole.
        shapes: Shape of each tensor of the whole network's state dict.
        trained: Names of the parameters that any rank trains, in the whole network's order.
        tied_to_stages: Parameters of this rank that other stages of a pipeline hold too -> their ranks.
        complete_gradients: All-reduces gradients that are partial sums; None if gradients are complete.
        class_shards: How logits are sharded by class; None if this rank computes the logits of all classes.
        uncompiled: Functions, each as (owner, name), that `torch.compile` must call as plain Python.
        is_adapted: Whether any layer of the whole network has an adapter of `lora`.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: RankMesh,
        cuts: Mapping[str, ShardSpec],
        shapes: Mapping[str, torch.Size],
        copies: frozenset[str] = frozenset(),
        trained: Sequence[str] = (),
        tied: Mapping[str, str] | None = None,
        is_adapted: bool = False,
        tied_to_stages: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """Registers the layout of `module`, this rank's shard of the network.

        Args:
            copies: Tied parameters that another pipeline stage owns.
            tied: Other name of a tied parameter -> its first name, which the optimizer's state uses.
        """
        self.mesh = mesh
        self.cuts = dict(cuts)
        self.shapes = dict(shapes)
        self.trained = tuple(trained)
        self.is_adapted = is_adapted
        self.tied_to_stages = dict(tied_to_stages or {})
        self.complete_gradients: Callable[[], None] | None = None
        self.class_shards: ClassShards | None = None
        self.uncompiled: tuple[tuple[Any, str], ...] = ()
        self._tied = dict(tied or {})
        self._parameters = [name for name, _ in module.named_parameters()]
        self._copies = copies
        _LAYOUTS[module] = self

    def shard(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Returns this rank's shard of a parameter, or of a tensor of the parameter's shape."""
        spec = self.cuts.get(name)
        if spec is None or whole.shape != self.shapes[name]:
            return whole
        return copy_shard(whole, spec, *self._at(spec))

    def full_name(self, name: str) -> str:
        """Returns a parameter's first name in the whole network. Tied parameters have several names."""
        return self._tied.get(name, name)

    def shard_parameters(self, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        known = {name: whole.get(self.full_name(name)) for name in self._parameters}
        return {name: self.shard(name, tensor) for name, tensor in known.items() if tensor is not None}

    def shard_optimizer_state(self, whole: Mapping[str, Mapping[str, StateValue]]) -> OptimizerState:
        """Returns this rank's shard of a whole optimizer state, by the parameter names of this rank."""
        known = {name: whole.get(self.full_name(name)) for name in self._parameters}
        # Keep unknown names, so that loading the state of another network is refused.
        known |= {name: values for name, values in whole.items() if name not in self.shapes}
        return {
            name: {k: self.shard(name, v) if isinstance(v, torch.Tensor) else v for k, v in values.items()}
            for name, values in known.items()
            if values is not None
        }

    def is_counted(self, name: str, among: Sequence[str] = ("expert", "sequence", "tensor")) -> bool:
        """Whether this rank's copy counts in a sum over the axes `among`: one copy of each element counts."""
        here, spec = self.mesh.coordinates, self.cuts.get(name)
        alike = [axis for axis in among if spec is None or spec.axis != axis]
        return name not in self._copies and all(here[axis] == 0 for axis in alike)

    def norm(self, named: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns the 2-norm of the whole network's gradients; this rank has `named`. Runs on every rank."""
        square = torch.zeros((), dtype=torch.float64)
        for name, gradient in named.items():
            if self.is_counted(name):
                square += torch.linalg.vector_norm(gradient, dtype=torch.float64).square().cpu()
        return self.mesh.holders.all_reduce(square.reshape(1))[0].sqrt()

    def plan_checkpoint(self, own: Mapping[str, torch.Tensor]) -> CheckpointShare:
        """Returns the tensors that this rank writes to a checkpoint. Runs on every rank."""
        entries, mesh = self._exchange_entries(own), self.mesh
        spreads = {}
        for name, entry in entries.items():
            if len(entry.holders) > 1:
                parts = tuple(mesh.checkpoint_part_of(holder) for holder in entry.holders)
                spreads[name] = CheckpointShards(self.cuts[self._parameter_of(name)], entry.shape, parts)
        names = {n for n, e in entries.items() if mesh.is_first_replica and mesh.holders.rank in e.holders}
        return CheckpointShare(frozenset(names), spreads, len(entries))

    def make_fetchable(self, own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns a meta tensor for each tensor of the whole network. Runs on every rank.

        The names are "<parameter>", or "<parameter>/<key>" for optimizer state. `gather_value` turns a meta
        tensor into the real tensor on rank 0; it also runs on every rank.
        """
        result = {}
        for name, entry in self._exchange_entries(own).items():
            result[name] = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")
            fetch = partial(self._fetch, name, entry, own.get(name))
            result[name].full_tensor = result[name].fetch = fetch  # type: ignore[attr-defined]
        return result

    def gather_values(self, own: OptimizerState) -> dict[str, dict[str, Any]]:
        """Returns the values of the whole optimizer state that are not tensors. Runs on every rank."""
        plain = {
            self.full_name(name): {k: v for k, v in values.items() if not isinstance(v, torch.Tensor)}
            for name, values in own.items()
        }
        result: dict[str, dict[str, Any]] = {}
        for text in gather_bytes(self.mesh.holders, json.dumps(plain).encode()):
            for name, values in json.loads(text).items():
                result.setdefault(name, {}).update(values)
        return {name: result[name] for name in sorted(result)}

    def _exchange_entries(self, own: Mapping[str, torch.Tensor]) -> dict[str, _Entry]:
        mesh = self.mesh
        merged: dict[str, _Entry] = {}
        if mesh.is_first_replica:
            described = {}
            for name, tensor in own.items():
                spec = self._spec_of(name, tensor)
                coordinate = 0 if spec is None else mesh.coordinates[spec.axis]
                shape = tensor.shape if spec is None else self.shapes[self._parameter_of(name)]
                described[name] = [coordinate, str(tensor.dtype).removeprefix("torch."), list(shape)]
            texts = gather_bytes(mesh.holders, json.dumps(described).encode())
            of_ranks = [json.loads(text) for text in texts]
            for name in sorted({name for known in of_ranks for name in known}):
                holders: dict[int, int] = {}
                for rank, known in enumerate(of_ranks):
                    if name in known:
                        holders.setdefault(known[name][0], rank)
                _, dtype, shape = next(known[name] for known in of_ranks if name in known)
                merged[name] = _Entry(tuple(shape), dtype, tuple(holders[at] for at in sorted(holders)))
        text = json.dumps({n: [e.shape, e.dtype, e.holders] for n, e in merged.items()}).encode()
        # Ranks of other replicas have nothing to send, but must know all tensors too.
        (known_text, *_) = gather_bytes(mesh.world, text if mesh.world.rank == 0 else b"")
        return {n: _Entry(tuple(s), d, tuple(h)) for n, (s, d, h) in json.loads(known_text).items()}

    def _at(self, spec: ShardSpec) -> tuple[int, int]:
        return self.mesh.coordinates[spec.axis], self.mesh.sizes[spec.axis]

    def _spec_of(self, name: str, tensor: torch.Tensor) -> ShardSpec | None:
        parameter = self._parameter_of(name)
        spec = self.cuts.get(parameter)
        if spec is None or list(tensor.shape) != shard_shape(self.shapes[parameter], spec, *self._at(spec)):
            return None
        return spec

    def _parameter_of(self, name: str) -> str:
        return name if name in self.shapes else name.rpartition("/")[0]

    def _fetch(self, name: str, entry: _Entry, own: torch.Tensor | None) -> torch.Tensor:
        holders, empty = self.mesh.holders, torch.empty(0, dtype=getattr(torch, entry.dtype))
        if own is not None and hasattr(own, "full_tensor"):
            # `sharding` has sharded this rank's tensor once more.
            own = gather_value(own)  # type: ignore[assignment]
        if not self.mesh.is_first_replica:
            return empty
        size = len(entry.holders)
        spec = self.cuts.get(self._parameter_of(name)) if size > 1 else None
        shapes = [list(entry.shape)] * size
        if spec is not None:
            shapes = [shard_shape(entry.shape, spec, rank, size) for rank in range(size)]
        counts = [0] * holders.size
        for holder, shape in zip(entry.holders, shapes, strict=True):
            counts[holder] = torch.Size(shape).numel()
        mine = empty
        if holders.rank in entry.holders:
            assert own is not None
            mine = own.detach().to("cpu").contiguous().reshape(-1)
        arrived = holders.gather(mine, counts)
        if not arrived:
            return empty
        shards = [arrived[holder].view(shape) for holder, shape in zip(entry.holders, shapes, strict=True)]
        if spec is not None:
            return join_shards(shards, spec)
        # Copy this rank's own tensor, because the optimizer changes it later; another rank's is a copy.
        return shards[0].clone() if entry.holders[0] == holders.rank else shards[0]
