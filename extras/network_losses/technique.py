"""Losses that take the network, as a gradient penalty does, and may differentiate through it again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ringspark.estimators.techniques import Technique
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.objective.criterion import Criterion
from ringspark.estimators.training.precision import LossScaler, autocast
from ringspark.estimators.training.selection import Pack
from ringspark.estimators.training.step import Recipe, forward
from ringspark.models.module_hooks import replace_forward

_CPU = torch.device("cpu")


class NetworkLosses(Technique):
    def check(self, training: Any) -> None:
        """Computes and differentiates each `NetworkLoss` once, to raise its errors before the gang starts."""
        module, name = training.module, type(training.module).__name__
        if isinstance(module, Pack):
            raise ValueError(
                f"model {name} scales the gradients of its members, so a loss that takes the module would "
                "get wrong derivatives; give another model"
            )
        recipe = Recipe(
            config=replace(training.config, precision="fp32"),
            criterion=Criterion(training.heads),
            scaler=LossScaler("fp32", _CPU),
            device=_CPU,
        )
        batch = Batch(inputs=training.inputs, labels=training.labels, weight=None)
        try:
            losses, _ = forward(recipe, module, module, batch, keeps_outputs=False)
            with recipe.criterion.differentiable():
                losses.sum().backward()  # type: ignore[no-untyped-call]
            module.zero_grad()
        except Exception as error:
            raise ValueError(
                f"a loss that takes the module fails with model {name}: {type(error).__name__}: {error}; "
                "change the loss, or use layers that torch can differentiate twice"
            ) from error

    @contextmanager
    def around_losses(self, config: Any, network: nn.Module, device: Any) -> Iterator[None]:
        """Makes a loss's own calls of the network compute in the config's precision, and the rest in fp32.

        Inner gradients must be computed outside of autocast, which would also round layers that stay in fp32.
        """
        if config.precision == "fp32":
            yield
            return
        with replace_forward(network, autocast(config.precision, device)(network.forward)):  # type: ignore[operator]
            yield
