"""LARS: momentum SGD with a rate scaled to each layer's weights (You et al. 2017, algorithm 1).

For batches of tens of thousands of rows. `learningRate` is a factor on a layer's rate: 1 to 30 is usual,
after a warm-up. Parameters with fewer than two dimensions step as in momentum SGD.
"""

from __future__ import annotations

from typing import Any

import torch

from ringspark.estimators.training.optimizers.base import DenseOptimizer
from ringspark.extras.optimizers.lamb import trust_ratio


class Lars(DenseOptimizer):
    """Momentum SGD with layer-wise rates; decay is part of the gradient, as in the paper."""

    settings = {"lr": 1.0, "momentum": 0.9, "trust_coefficient": 1e-3, "weight_decay": 0.0}

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        decay = group["weight_decay"]
        direction = gradient.add(parameter, alpha=decay) if decay else gradient
        if parameter.dim() > 1:
            weights = parameter.norm()
            ratio = trust_ratio(weights * group["trust_coefficient"], gradient.norm() + decay * weights)
            direction = direction * ratio
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        # The buffer includes the rate, so a schedule affects new gradients but not earlier ones.
        velocity = state["momentum_buffer"].mul_(group["momentum"]).add_(direction, alpha=group["lr"])
        parameter.sub_(velocity)
