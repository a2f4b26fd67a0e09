"""1-bit Adam (Tang et al. 2021): Adam with second moments that freeze when gradients are compressed.

Error feedback sends parts of a gradient in later steps. Momentum still adds these parts up correctly, but a
mean of squares does not. So squares are averaged only until step `after`, when the compression begins.
"""

from __future__ import annotations

from typing import Any

import torch

from ringspark.estimators.training.optimizers.base import DenseOptimizer, count_step

# Smallest frozen second moment, as a share of the parameter's mean. Unlike in the paper, a weight without a
# gradient so far (a category not seen yet) must not move by thousands of steps at its first gradient.
_LEAST = 1e-3


class Adam1bit(DenseOptimizer):
    """AdamW until `freeze_variance`, then momentum scaled by the last second moments."""

    settings = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "is_frozen": False}
    is_elementwise = True

    @torch.no_grad()
    def freeze_variance(self) -> None:
        """Freezes the second moments. Checkpoints keep `is_frozen`, because it is in the parameter groups."""
        for group in self.param_groups:
            group["is_frozen"] = True
            for parameter in group["params"]:
                if state := self.state.get(parameter):
                    squares = state["exp_avg_sq"]
                    squares.clamp_(min=_LEAST * squares.mean())
                    if not squares.any():
                        state["squares"].zero_()  # as if there had been no gradient: the first one sets them

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
            state["squares"] = torch.zeros((), dtype=torch.float32, device="cpu")
        beta1, beta2 = group["betas"]
        step = count_step(state)
        # A parameter without a gradient before the freeze still needs a first second moment.
        if not group["is_frozen"] or not state["squares"]:
            state["squares"] += 1
            state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        squares = state["exp_avg_sq"] / (1 - beta2 ** float(state["squares"]))
        parameter.addcdiv_(
            state["exp_avg"], squares.sqrt_().add_(group["eps"]), value=-group["lr"] / (1 - beta1**step)
        )
