"""1-bit Adam (Tang et al. 2021): Adam whose second moments stay as they are once gradients are compressed.

Error feedback sends a part of a gradient in later steps. An optimizer that is linear in the gradients, such
as momentum, gets the same sum in the end; Adam's square of the gradient does not. Here the squares are
averaged while gradients travel whole, the `after` of `gradientCompression`, and then kept: what remains is
momentum with a fixed rate for each weight.

The paper divides by the root of what is kept, which is next to nothing for a weight that had no gradient
till then: that of a category not seen yet, or behind a dead unit. Its first gradient, or the noise of the
compression, would move it by thousands of steps at once. So no second moment is kept below a thousandth of
its parameter's mean.
"""

from __future__ import annotations

from typing import Any

import torch

from ringspark.estimators.training.optimizers.base import DenseOptimizer, count_step

# The smallest second moment that is kept, as a share of the mean over the parameter: no rate is more than
# about 30 times the usual one.
_LEAST = 1e-3


class Adam1bit(DenseOptimizer):
    """AdamW until `freeze_variance` is called, momentum scaled by the last second moments after it."""

    settings = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "is_frozen": False}
    is_elementwise = True

    @torch.no_grad()
    def freeze_variance(self) -> None:
        """Keeps the second moments from now on; the flag is a value of the groups, which checkpoints hold."""
        for group in self.param_groups:
            group["is_frozen"] = True
            for parameter in group["params"]:
                if state := self.state.get(parameter):
                    squares = state["exp_avg_sq"]
                    squares.clamp_(min=_LEAST * squares.mean())
                    if not squares.any():
                        state["squares"].zero_()  # as if it had had no gradient: its first one makes them

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
            state["squares"] = torch.zeros((), dtype=torch.float32, device="cpu")
        beta1, beta2 = group["betas"]
        step = count_step(state)
        # A parameter that never had a gradient before still needs a first second moment.
        if not group["is_frozen"] or not state["squares"]:
            state["squares"] += 1
            state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        squares = state["exp_avg_sq"] / (1 - beta2 ** float(state["squares"]))
        parameter.addcdiv_(
            state["exp_avg"], squares.sqrt_().add_(group["eps"]), value=-group["lr"] / (1 - beta1**step)
        )
