"""Batch normalization that accepts a single row in training, such as the last row of an epoch.

PyTorch's own layer raises an error if a channel has only one value, because one value has no variance. In
this case, the layer of this module normalizes with its running statistics and does not update them.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def accept_single_rows(module: nn.Module) -> None:
    for layer in module.modules():
        if isinstance(layer, _BatchNorm) and layer.track_running_stats:
            layer.register_forward_pre_hook(_evaluate_single_values)
            layer.register_forward_hook(_train_again, always_call=True)


def _evaluate_single_values(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    values = inputs[0]
    if layer.training and values.dim() > 1 and values.numel() == values.shape[1]:
        layer.training = False
        layer._ringspark_single = True  # type: ignore[assignment]


def _train_again(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    if getattr(layer, "_ringspark_single", False):
        layer.training = True
        layer._ringspark_single = False  # type: ignore[assignment]
