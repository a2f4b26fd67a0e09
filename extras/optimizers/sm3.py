"""SM3: Adagrad with one number per row and per column instead of one per weight (Anil et al. 2019, SM3-II).

There is no momentum, which would take as much memory as the weights. Weight decay is decoupled, as in AdamW.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import reduce
from typing import Any

import torch

from ringspark.extras.optimizers.base import Batch, DenseOptimizer, TensorList

# Smaller than the square of any relevant gradient; a weight without a gradient so far gets update 0.
TINY = 1e-30


class SM3(DenseOptimizer):
    """Adagrad with sums of squared gradients per row and column; a weight uses the smallest of its sums."""

    settings = {"lr": 0.1, "weight_decay": 0.0}

    def new_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        dims = range(max(1, parameter.dim()))  # a scalar is its own line
        return {f"accumulator_{dim}": parameter.new_zeros(parameter.shape[dim : dim + 1]) for dim in dims}

    def kind(self, parameter: torch.Tensor) -> Hashable:
        return parameter.dim()

    def update(self, batch: Batch, group: dict[str, Any]) -> None:
        num_dims = batch.parameters[0].dim()
        dims = range(max(1, num_dims))
        shapes = [[-1 if d == dim else 1 for d in range(num_dims)] for dim in dims]
        lines = [
            TensorList(own.view(shape) for own in batch.state(f"accumulator_{dim}"))
            for dim, shape in enumerate(shapes)
        ]
        sums = batch.gradients.mul(batch.gradients)
        sums.add_(reduce(lambda least, own: least.minimum(own), lines))
        others = [[d - num_dims for d in dims if d != dim] for dim in dims]
        largest = sums.reduce(torch.amax, *others) if num_dims > 1 else [sums]
        for own, found in zip(lines, largest, strict=True):
            own.copy_(found)
        if group["weight_decay"]:
            batch.parameters.mul_(1 - group["lr"] * group["weight_decay"])
        batch.parameters.addcmul_(sums.clamp_min_(TINY).rsqrt_(), batch.gradients, -group["lr"])
