"""Tries losses that take the network, on the driver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.objective.criterion import Criterion
from ringspark.estimators.training.objective.heads import Head
from ringspark.estimators.training.precision import LossScaler
from ringspark.estimators.training.selection import Pack
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.estimators.training.step import Recipe, forward

_CPU = torch.device("cpu")


def check_network_losses(config: TrainConfig, heads: Sequence[Head], module: nn.Module, batch: Batch) -> None:
    """Computes and differentiates each `NetworkLoss` once, to raise its errors before the gang starts."""
    name = type(module).__name__
    if isinstance(module, Pack):
        raise ValueError(
            f"model {name} scales the gradients of its members, so a loss that takes the module would get "
            "wrong derivatives; give another model"
        )
    config = replace(config, precision="fp32")
    recipe = Recipe(config=config, criterion=Criterion(heads), scaler=LossScaler("fp32", _CPU), device=_CPU)
    try:
        losses, _ = forward(recipe, module, module, batch, keeps_outputs=False)
        with recipe.criterion.differentiable():
            losses.sum().backward()  # type: ignore[no-untyped-call]
        module.zero_grad()
    except Exception as error:
        raise ValueError(
            f"a loss that takes the module fails with model {name}: {type(error).__name__}: {error}; change "
            "the loss, or use layers that torch can differentiate twice"
        ) from error
