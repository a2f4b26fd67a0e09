"""Adafactor: Adam's second moment as the product of a row and a column (Shazeer and Stern 2018).

The step size is min(lr, 1 / sqrt(step)) times the root mean square of the weights; an `lr` of 1e-2 is usual.
Results equal torch.optim.Adafactor's, which waits for the device twice per parameter and cannot step on meta
tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from ringspark.extras.optimizers.base import Batch, DenseOptimizer, TensorList


class Adafactor(DenseOptimizer):
    """Factors second moments over the last two dimensions; `clip` bounds an update's root mean square."""

    settings = {"lr": 1e-2, "beta2_decay": -0.8, "eps": 1e-3, "clip": 1.0, "weight_decay": 0.0}

    def new_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        if parameter.dim() < 2:
            return {"variance": torch.zeros_like(parameter)}
        rows, columns = (*parameter.shape[:-1], 1), (*parameter.shape[:-2], 1, parameter.shape[-1])
        return {"row_var": parameter.new_zeros(rows), "col_var": parameter.new_zeros(columns)}

    def update(self, batch: Batch, group: dict[str, Any]) -> None:
        parameters, gradients, step = batch.parameters, batch.gradients, batch.step
        rates = _rms(parameters).clamp_min_(group["eps"]).mul_(min(group["lr"], step**-0.5))
        if group["weight_decay"]:
            parameters.mul_(1 - group["lr"] * group["weight_decay"])
        tiny = torch.finfo(parameters[0].dtype).eps
        fresh = step ** group["beta2_decay"]
        factored, full = iter(_factored(batch, fresh, tiny)), iter(_full(batch, fresh))
        squares = TensorList(next(factored if gradient.dim() > 1 else full) for gradient in gradients)
        directions = squares.clamp_min(tiny * tiny).rsqrt_().mul_(gradients)
        rates.div_(_rms(directions).div_(group["clip"]).clamp_min_(1.0))
        parameters.sub_(directions.mul_(rates))


def _full(batch: Batch, fresh: float) -> TensorList:
    """Updates the average squared gradients of vectors; `fresh` is the weight of the new gradients."""
    squares = batch.state("variance")
    if squares:
        gradients = TensorList(gradient for gradient in batch.gradients if gradient.dim() < 2)
        squares.lerp_(gradients.mul(gradients), fresh)
    return squares


def _factored(batch: Batch, fresh: float, tiny: float) -> TensorList:
    """Estimates the second moments of matrices from row and column means."""
    rows, columns = batch.state("row_var"), batch.state("col_var")
    if not rows:
        return rows
    gradients = TensorList(gradient for gradient in batch.gradients if gradient.dim() > 1)
    # Norms, so that no tensors of squares are made.
    norms = gradients.reduce(torch.linalg.vector_norm, [-1], [-2])
    for own, means, dim in zip((rows, columns), norms, (-1, -2), strict=True):
        own.lerp_(means.mul_(means).div_([gradient.shape[dim] for gradient in gradients]), fresh)
    (totals,) = rows.reduce(torch.mean, [-2])
    return TensorList(rows.mul(columns).div_(totals.clamp_min_(tiny)))


def _rms(values: TensorList) -> TensorList:
    return TensorList(values.norm().div_([max(1, value.numel()) ** 0.5 for value in values]))
