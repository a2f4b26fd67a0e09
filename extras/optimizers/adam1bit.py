"""1-bit Adam (Tang et al. 2021): Adam with second moments that freeze when gradients are compressed.

Error feedback sends parts of a gradient in later steps. Momentum still adds these parts up correctly, but a
mean of squares does not. So squares are averaged only until step `after`, when the compression begins.
"""

from __future__ import annotations

from typing import Any

import torch

from ringspark.extras.optimizers.base import Batch, DenseOptimizer, TensorList, count

# Smallest frozen second moment, as a share of the parameter's mean. Unlike in the paper, a weight without a
# gradient so far (a category not seen yet) must not move by thousands of steps at its first gradient.
_LEAST = 1e-3


class Adam1bit(DenseOptimizer):
    """AdamW until `freeze_variance`, then momentum scaled by the last second moments."""

    settings = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "is_frozen": False}
    moments = ("exp_avg", "exp_avg_sq")
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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the counts `squares` in fp32 on the host; torch does so for `step` alone."""
        super().load_state_dict(state_dict)
        old = (number for group in state_dict["param_groups"] for number in group["params"])
        new = (parameter for group in self.param_groups for parameter in group["params"])
        for number, parameter in zip(old, new, strict=True):
            if "squares" in state_dict["state"].get(number, {}):
                self.state[parameter]["squares"] = state_dict["state"][number]["squares"].float().cpu()

    def new_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        squares = torch.zeros((), dtype=torch.float32, device="cpu")
        return super().new_state(parameter) | {"squares": squares}

    def update(self, batch: Batch, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        gradients, squares = batch.gradients.local(), batch.state("exp_avg_sq").local()
        counts = count(batch.states, "squares", by=0)
        # A parameter without a gradient before the freeze still needs a first second moment.
        if moving := [i for i, number in enumerate(counts) if not (group["is_frozen"] and number)]:
            moved, own = (TensorList(values[i] for i in moving) for values in (squares, gradients))
            moved.mul_(beta2).addcmul_(own, own, 1 - beta2)
            count([batch.states[i] for i in moving], "squares")
            counts = count(batch.states, "squares", by=0)
        weights = batch.parameters.local().mul_(1 - group["lr"] * group["weight_decay"])
        means = batch.state("exp_avg").local().lerp_(gradients, 1 - beta1)
        roots = squares.div([1 - beta2**number for number in counts]).sqrt_().add_(group["eps"])
        weights.addcdiv_(means, roots, -group["lr"] / (1 - beta1**batch.step))
