"""Deferred initialization: sends each rank its shard of the initial weights. No rank holds the whole network.

Rank 0 initializes one tensor at a time and broadcasts it, so all ranks have the same rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ringspark.estimators.collectives.base import num_bytes
from ringspark.estimators.parallel.layout import layout_of
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.parallel.optimizer_state import shard_like
from ringspark.models.deferred_init import InitialWeights
from ringspark.models.meta_device import fill

_DEFERRED: WeakKeyDictionary[nn.Module, InitialWeights] = WeakKeyDictionary()
# Small tensors are broadcast together, up to this size.
_BUNDLE_BYTES = 4 << 20


def defer_weights(module: nn.Module, first: InitialWeights) -> None:
    _DEFERRED[module] = first


def is_deferred(module: nn.Module) -> bool:
    return module in _DEFERRED


def send_initial_weights(module: nn.Module, mesh: RankMesh, device: torch.device) -> None:
    """Fills this rank's parameters with their initial values, on `device`. Runs on every rank."""
    first = _DEFERRED.pop(module)
    known = dict(module.named_parameters(remove_duplicate=False))
    is_sharded = any(hasattr(p, "full_tensor") for p in known.values())
    if is_sharded:
        kept = {name: buffer.clone() for name, buffer in module.named_buffers()}
        module.to_empty(device=device)
        known = dict(module.named_parameters(remove_duplicate=False))
        for name, buffer in module.named_buffers():
            buffer.copy_(kept[name])
    layout = layout_of(module)
    state: dict[str, torch.Tensor] = {}
    for name, whole in _broadcast(first, mesh, device):
        own = known.get(name)
        if own is None:
            continue
        shard = whole if layout is None else layout.shard(name, whole)
        if is_sharded:
            with torch.no_grad():
                own.copy_(shard_like(shard, own))
        else:
            # Separate memory, so that the whole tensor is freed.
            state[name] = shard.clone() if shard is whole else shard
    if not is_sharded:
        buffers = {n: b for n, b in module.state_dict().items() if n not in state}
        fill(module, state | {name: buffer.to(device) for name, buffer in buffers.items()})
        module.to(device)  # buffers that no state dict holds


def _broadcast(
    first: InitialWeights, mesh: RankMesh, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    for names in _bundles(first.tensors):
        if mesh.world.rank == 0:
            tensors = [first.initialize(name).to(device) for name in names]
        else:
            tensors = [torch.empty_like(first.tensors[name], device=device) for name in names]
        with torch.no_grad():
            mesh.world.broadcast(tensors)
        while names:
            yield names.pop(), tensors.pop()


def _bundles(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    bundle: list[str] = []
    filled = 0
    for name, tensor in tensors.items():
        size = num_bytes([tensor])
        if bundle and filled + size > _BUNDLE_BYTES:
            yield bundle
            bundle, filled = [], 0
        bundle.append(name)
        filled += size
    if bundle:
        yield bundle
