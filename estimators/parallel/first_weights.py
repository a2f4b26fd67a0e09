"""Gives each rank its part of the first weights, of a network that no rank ever holds whole.

The first rank draws one tensor at a time and sends it to all; each keeps its part. So the numbers are those
of the network built as a whole, on ranks whose processors would round them otherwise too, and a rank needs
the memory of its part and of one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ringspark.estimators.collectives.base import num_bytes
from ringspark.estimators.parallel.layout import layout_of
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.parallel.optimizer_state import part_of
from ringspark.models.deferred_init import InitialWeights
from ringspark.models.meta_device import fill

_WAITING: WeakKeyDictionary[nn.Module, InitialWeights] = WeakKeyDictionary()
# Small tensors travel together, up to so many bytes.
_BUNDLE_BYTES = 4 << 20


def put_off(module: nn.Module, first: InitialWeights) -> None:
    """Notes that the parameters of a network have no numbers yet."""
    _WAITING[module] = first


def waits(module: nn.Module) -> bool:
    """Whether the parameters have no numbers yet."""
    return module in _WAITING


def give_first_weights(module: nn.Module, mesh: RankMesh, device: torch.device) -> None:
    """Gives the parameters that this rank has their numbers. Runs on every rank.

    Args:
        module: This rank's part of the network, cut by `spread` or into `DTensor` parts.
        device: Where they are to be.
    """
    first = _WAITING.pop(module)
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
    for name, whole in _arriving(first, mesh, device):
        own = known.get(name)
        if own is None:
            continue
        part = whole if layout is None else layout.own(name, whole)
        if is_sharded:
            with torch.no_grad():
                own.copy_(part_of(part, own))
        else:
            # In memory of its own: the whole is to be freed.
            state[name] = part.clone() if part is whole else part
    if not is_sharded:
        buffers = {n: b for n, b in module.state_dict().items() if n not in state}
        fill(module, state | {name: buffer.to(device) for name, buffer in buffers.items()})
        module.to(device)  # buffers that no state dict holds


def _arriving(
    first: InitialWeights, mesh: RankMesh, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the name and the numbers of each parameter. Runs on every rank."""
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
