"""LARS: momentum SGD with a rate scaled to each layer's weights (You et al. 2017, algorithm 1).

For batches of tens of thousands of rows. `learningRate` is a factor on a layer's rate: 1 to 30 is usual,
after a warm-up. Parameters with fewer than two dimensions step as in momentum SGD.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from ringspark.extras.optimizers.base import Batch, DenseOptimizer
from ringspark.extras.optimizers.lamb import trust_ratio


class Lars(DenseOptimizer):
    """Momentum SGD with layer-wise rates; decay is part of the gradient, as in the paper."""

    settings = {"lr": 1.0, "momentum": 0.9, "trust_coefficient": 1e-3, "weight_decay": 0.0}
    moments = ("momentum_buffer",)

    def kind(self, parameter: torch.Tensor) -> Hashable:
        return parameter.dim() > 1

    def update(self, batch: Batch, group: dict[str, Any]) -> None:
        parameters, decay = batch.parameters, group["weight_decay"]
        directions = batch.gradients.add(parameters, alpha=decay) if decay else batch.gradients
        if parameters[0].dim() > 1:
            weights, gradients = (torch.stack(values.norm()) for values in (parameters, batch.gradients))
            ratios = trust_ratio(weights * group["trust_coefficient"], gradients + decay * weights)
            directions = directions.mul(ratios.unbind())
        # The buffer includes the rate, so a schedule affects new gradients but not earlier ones.
        velocities = batch.state("momentum_buffer").mul_(group["momentum"])
        parameters.sub_(velocities.add_(directions, alpha=group["lr"]))
