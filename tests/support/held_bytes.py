"""Bytes of a rank's training state, from its actual tensors."""

from typing import Any

import torch

from ringspark.estimators.parallel.base import GradientSync


def held_bytes(sync: GradientSync) -> dict[str, int]:
    """Returns the bytes on this rank; of a sharded tensor, only the rank's shard."""
    parameters = list(sync.network.parameters())
    stepped = [p for group in sync.optimizer.param_groups for p in group["params"]]
    gradients = {id(p.grad): p.grad for p in (*parameters, *stepped) if p.grad is not None}
    # ZeRO stage 2 keeps accumulated gradients next to the parameters.
    summed = [part for own in getattr(sync, "_states", ()) for part in own.summed if part is not None]
    states = [value for state in sync.optimizer.state.values() for value in state.values()]
    return {
        "parameters": sum(map(_bytes, parameters)),
        "gradients": sum(map(_bytes, (*gradients.values(), *summed))),
        "optimizer": sum(_bytes(value) for value in states if isinstance(value, torch.Tensor)),
    }


def _bytes(tensor: Any) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.numel() * local.element_size())
