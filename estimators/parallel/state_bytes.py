"""Counts the bytes of a training's state on one rank, from its actual tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ringspark.estimators.parallel.gradient_sync import GradientSync


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes that one rank holds, at the moment of the count."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def state_bytes(sync: GradientSync) -> StateBytes:
    """Counts the bytes that this rank holds; of tensors that lie on several ranks, only its own part."""
    states = [value for state in sync.optimizer.state.values() for value in state.values()]
    return StateBytes(
        parameters=sum(_bytes(p) for p in sync.network.parameters()),
        gradients=sum(_bytes(g) for g in sync.gradients()),
        optimizer=sum(_bytes(value) for value in states if isinstance(value, torch.Tensor)),
    )


def _bytes(tensor: Any) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.numel() * local.element_size())
