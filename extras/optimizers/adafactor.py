"""Adafactor: Adam's second moment as the product of a row and a column (Shazeer and Stern 2018).

The step size is min(lr, 1 / sqrt(step)) times the root mean square of the weights; an `lr` of 1e-2 is usual.
Results equal torch.optim.Adafactor's, which waits for the device twice per parameter and cannot step on meta
tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from ringspark.estimators.training.optimizers.base import DenseOptimizer, count_step


class Adafactor(DenseOptimizer):
    """Factors second moments over the last two dimensions; `clip` bounds an update's root mean square."""

    settings = {"lr": 1e-2, "beta2_decay": -0.8, "eps": 1e-3, "clip": 1.0, "weight_decay": 0.0}

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        step = count_step(state)
        fresh = step ** group["beta2_decay"]
        rate = torch.clamp(_rms(parameter), min=group["eps"]) * min(group["lr"], step**-0.5)
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        tiny = torch.finfo(parameter.dtype).eps
        if gradient.dim() > 1:
            square = _factored(gradient, state, fresh, tiny)
        else:
            if "variance" not in state:
                state["variance"] = torch.zeros_like(parameter)
            square = state["variance"].lerp_(gradient * gradient, fresh).clone()
        direction = square.clamp_(min=tiny * tiny).rsqrt_().mul_(gradient)
        parameter.sub_(direction.mul_(rate / torch.clamp(_rms(direction) / group["clip"], min=1.0)))


def _factored(gradient: torch.Tensor, state: dict[str, Any], fresh: float, tiny: float) -> torch.Tensor:
    """Estimates second moments from row and column means; `fresh` weighs this gradient."""
    if "row_var" not in state:
        state["row_var"] = gradient.new_zeros((*gradient.shape[:-1], 1))
        state["col_var"] = gradient.new_zeros((*gradient.shape[:-2], 1, gradient.shape[-1]))
    for name, dim in (("row_var", -1), ("col_var", -2)):
        # A norm, so that no tensor of squares is made.
        mean = torch.linalg.vector_norm(gradient, dim=dim, keepdim=True).square() / gradient.shape[dim]
        state[name].lerp_(mean, fresh)
    estimate: torch.Tensor = state["row_var"] @ state["col_var"]
    return estimate.div_(state["row_var"].mean(dim=-2, keepdim=True).clamp_(min=tiny))


def _rms(values: torch.Tensor) -> torch.Tensor:
    rms: torch.Tensor = torch.linalg.vector_norm(values) / max(1, values.numel()) ** 0.5
    return rms
