"""Gathers and loads the whole optimizer state of a sharded training, by parameter name.

The root of a parameter receives one tensor at a time, on the CPU.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from ringspark.estimators.collectives.base import gather_bytes
from ringspark.estimators.parallel.optimizer_state import (
    OptimizerState,
    RootOf,
    StateValue,
    check_value,
    first_rank,
    place_value,
)
from ringspark.estimators.parallel.sharded.parameter_shards import ShardedParameters, slice_state, view_at
from ringspark.estimators.parallel.sharded.shard_layout import ParameterSlice


def gather_state(
    shard: ShardedParameters, optimizer: torch.optim.Optimizer, root_of: RootOf = first_rank
) -> OptimizerState:
    """Returns the tensors on the root of each parameter, other values on all ranks. Runs on every rank."""
    collective = shard.collective
    mine = {piece.index: optimizer.state.get(tensor) or {} for piece, tensor in shard.held.items()}
    described = {
        index: {key: _describe(shard, index, key, value) for key, value in sorted(state.items())}
        for index, state in mine.items()
    }
    texts = gather_bytes(collective, json.dumps(described).encode())
    entries: list[dict[str, Any]] = [json.loads(text) for text in texts]
    result: OptimizerState = {}
    for index, name in sorted(enumerate(shard.names), key=lambda item: item[1]):
        owners = shard.owners(index)
        if not owners:
            continue
        # All owners of a parameter have the same keys and plain values, so use the first owner's.
        values: dict[str, StateValue] = {}
        for key, entry in entries[owners[0].rank].get(str(index), {}).items():
            if "value" in entry:
                values[key] = entry["value"]
                continue
            own = mine.get(index, {}).get(key)
            gathered = _gather_tensor(shard, index, own, entry, owners, root_of(name))
            if gathered is not None:
                values[key] = gathered
        if values:
            result[name] = values
    return result


def _describe(shard: ShardedParameters, index: int, key: str, value: object) -> dict[str, Any]:
    """Returns a value's dtype and shape, or the value itself if it is no tensor."""
    value = check_value(shard.names[index], key, value)
    if not isinstance(value, torch.Tensor):
        return {"value": value}
    dtype = str(value.dtype).removeprefix("torch.")
    # A slice has one dimension, so a state tensor of the same shape is sliced like the parameter.
    held = next(t for piece, t in shard.held.items() if piece.index == index)
    if shard.is_even and value.shape == held.shape:
        return {"dtype": dtype, "shape": None}
    return {"dtype": dtype, "shape": list(value.shape)}


def _gather_tensor(
    shard: ShardedParameters,
    index: int,
    own: torch.Tensor | None,
    entry: dict[str, Any],
    owners: list[ParameterSlice],
    root: int,
) -> torch.Tensor | None:
    dtype: torch.dtype = getattr(torch, entry["dtype"])
    collective = shard.collective
    elements = [0] * collective.size
    if entry["shape"] is None:
        for piece in owners:
            elements[piece.rank] = piece.stop - piece.start
    else:
        elements[owners[0].rank] = torch.Size(entry["shape"]).numel()
    mine = torch.zeros(0, dtype=dtype)
    if own is not None and elements[collective.rank]:
        mine = own.detach().cpu().reshape(-1)
    parts = collective.gather(mine, elements, root)
    if collective.rank != root:
        return None
    joined = torch.cat(parts)
    if entry["shape"] is not None:
        return joined.reshape(entry["shape"])
    return view_at(joined, 0, shard.parameters[index].shape, shard.strides[index]).contiguous()


def load_state(shard: ShardedParameters, optimizer: torch.optim.Optimizer, state: OptimizerState) -> None:
    """Loads this rank's shard of a whole state into the optimizer; the state of other parameters stays."""
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    for piece, tensor in shard.held.items():
        values = state.get(shard.names[piece.index])
        optimizer.state.pop(tensor, None)
        if values is not None:
            parameter = shard.parameters[piece.index]
            optimizer.state[tensor] = {
                key: place_value(slice_state(value, parameter, piece, tensor), tensor, groups[tensor], key)
                for key, value in values.items()
            }
