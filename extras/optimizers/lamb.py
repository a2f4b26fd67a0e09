"""LAMB: Adam's direction, with a rate scaled to each layer's weights (You et al. 2020, algorithm 2).

For batches of tens of thousands of rows. Biases and gains step as in AdamW, as in the paper's BERT training:
their norms may start at 0, and a proportional rate would keep them there.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from ringspark.extras.optimizers.base import Batch, DenseOptimizer


class Lamb(DenseOptimizer):
    """Adam, with each layer's update scaled to the norm of the layer's weights."""

    settings = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0}
    moments = ("exp_avg", "exp_avg_sq")

    def kind(self, parameter: torch.Tensor) -> Hashable:
        return parameter.dim() > 1

    def update(self, batch: Batch, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        gradients = batch.gradients
        means = batch.state("exp_avg").lerp_(gradients, 1 - beta1)
        squares = batch.state("exp_avg_sq").mul_(beta2).addcmul_(gradients, gradients, 1 - beta2)
        roots = squares.div(1 - beta2**batch.step).sqrt_().add_(group["eps"])
        directions = means.div(roots).div_(1 - beta1**batch.step)
        if group["weight_decay"]:
            directions.add_(batch.parameters, alpha=group["weight_decay"])
        if batch.parameters[0].dim() > 1:
            norms = (torch.stack(values.norm()) for values in (batch.parameters, directions))
            directions.mul_(trust_ratio(*norms).unbind())
        batch.parameters.add_(directions, alpha=-group["lr"])


def trust_ratio(weights: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    """Returns norms of weights divided by norms of their updates; 1 if either norm is 0."""
    usable = (weights > 0) & (update > 0)
    return torch.where(usable, weights / torch.where(usable, update, 1.0), 1.0)
