"""Converts a rank's optimizer state to tensors for a checkpoint, and averages it over the ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel.optimizer_state import load_by_name, state_by_name
from ringspark.estimators.training.checkpoint.shards import group_by_parameter
from ringspark.extras.local_sgd.flat_weights import FlatWeights

_PLAIN = "optimizer_values"
_PREFIX = "optimizer/"


def state_tensors(network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Returns a copy of the optimizer state on the CPU; stores numbers and strings as the bytes of JSON."""
    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    for name, own in state_by_name(network, optimizer).items():
        plain[name] = {}
        for key, value in own.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{_PREFIX}{name}/{key}"] = value.to("cpu", copy=True).contiguous()
            else:
                plain[name][key] = value
    tensors[_PLAIN] = torch.frombuffer(bytearray(json.dumps(plain).encode()), dtype=torch.uint8)
    return tensors


def load_tensors(
    network: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]
) -> None:
    if _PLAIN not in tensors:
        return
    own = {key.removeprefix(_PREFIX): tensors[key] for key in tensors if key.startswith(_PREFIX)}
    state: Any = group_by_parameter(json.loads(tensors[_PLAIN].numpy().tobytes()), own)
    optimizer.state.clear()
    load_by_name(network, optimizer, state)


@torch.no_grad()
def average_state(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], collective: Collective
) -> None:
    """Averages momentum and second moments over the ranks. Runs on every rank.

    A parameter's state stays unchanged if the parameter never had a gradient on some rank.
    """
    device = parameters[0].device
    has = torch.tensor([float(bool(optimizer.state.get(p))) for p in parameters], device=device)
    everywhere = collective.all_reduce(has) == collective.size
    tensors = [
        value
        for parameter, is_shared in zip(parameters, everywhere.tolist(), strict=True)
        if is_shared
        for _, value in sorted(optimizer.state[parameter].items())
        if isinstance(value, torch.Tensor) and value.dim() and value.is_floating_point()
    ]
    if tensors:
        held = FlatWeights(tensors)
        total = held.read()
        collective.start_sum(total, "local.optimizer")()
        held.write(total / collective.size)
