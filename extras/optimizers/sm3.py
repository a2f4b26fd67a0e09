"""SM3: Adagrad with one number per row and per column instead of one per weight (Anil et al. 2019, SM3-II).

There is no momentum, which would take as much memory as the weights. Weight decay is decoupled, as in AdamW.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch

from ringspark.estimators.training.optimizers.base import DenseOptimizer

# Smaller than the square of any relevant gradient; a weight without a gradient so far gets update 0.
TINY = 1e-30


class SM3(DenseOptimizer):
    """Adagrad with sums of squared gradients per row and column; a weight uses the smallest of its sums."""

    settings = {"lr": 0.1, "weight_decay": 0.0}

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        lines = max(1, parameter.dim())  # a scalar is its own line
        if not state:
            for dim in range(lines):
                state[f"accumulator_{dim}"] = parameter.new_zeros(parameter.shape[dim : dim + 1])
        sums = gradient * gradient
        shapes = [[-1 if d == dim else 1 for d in range(parameter.dim())] for dim in range(lines)]
        sums += reduce(
            torch.minimum, (state[f"accumulator_{dim}"].view(shape) for dim, shape in enumerate(shapes))
        )
        for dim in range(lines):
            others = [d for d in range(parameter.dim()) if d != dim]
            state[f"accumulator_{dim}"].copy_(sums.amax(others) if others else sums)
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcmul_(sums.clamp_(min=TINY).rsqrt_(), gradient, value=-group["lr"])
