"""LAMB: Adam's direction, with a rate scaled to each layer's weights (You et al. 2020, algorithm 2).

For batches of tens of thousands of rows. Biases and gains step as in AdamW, as in the paper's BERT training:
their norms may start at 0, and a proportional rate would keep them there.
"""

from __future__ import annotations

from typing import Any

import torch

from ringspark.estimators.training.optimizers.base import DenseOptimizer, count_step


class Lamb(DenseOptimizer):
    """Adam, with each layer's update scaled to the norm of the layer's weights."""

    settings = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0}

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        beta1, beta2 = group["betas"]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        step = count_step(state)
        mean = state["exp_avg"].lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        direction = torch.div(mean, root, out=root).div_(1 - beta1**step)
        if group["weight_decay"]:
            direction.add_(parameter, alpha=group["weight_decay"])
        if parameter.dim() > 1:
            direction.mul_(trust_ratio(parameter.norm(), direction.norm()))
        parameter.add_(direction, alpha=-group["lr"])


def trust_ratio(weights: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    """Returns the norm of `weights` divided by the norm of `update`; 1 if either norm is 0."""
    usable = (weights > 0) & (update > 0)
    return torch.where(usable, weights / torch.where(usable, update, 1.0), 1.0)
