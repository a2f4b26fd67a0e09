"""Losses that compare a reconstruction with the inputs, and leave out positions without a target.

Each loss returns the sum over a row's positions, and `row_weights` counts them. So the loss of a batch is the
mean over all positions with a target, on any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import functional

from ringspark.extras.pretraining.corruption import IGNORED


class ReconstructionLoss:
    """Squared error of numbers, or cross entropy of ids with logits (rows, ..., ids).

    A target that is NaN or `IGNORED` does not count.
    """

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if target.is_floating_point():
            if output.numel() != target.numel():
                raise ValueError(
                    f"the network must reconstruct its inputs, {tuple(target.shape)}, got "
                    f"{tuple(output.shape)}; match the size of its last layer"
                )
            return _squares(output.reshape(target.shape), target).flatten(1).sum(1)
        if output.dim() != target.dim() + 1 or output.shape[:-1] != target.shape:
            raise ValueError(
                "integers are reconstructed as ids, so the network must return logits of shape "
                f"{(*target.shape, 'number of ids')}, got {tuple(output.shape)}; cast the column to double "
                "to reconstruct numbers"
            )
        values = _cross_entropy(output, target)
        return values.flatten(1).sum(1) if values.dim() > 1 else values

    def row_weights(self, target: torch.Tensor) -> torch.Tensor:
        known = ~target.isnan() if target.is_floating_point() else target != IGNORED
        return known.float().flatten(1).sum(1) if target.dim() > 1 else known.float()


class TableLoss:
    """The loss of a network for tables, whose outputs are M numbers and the logits of each category.

    The cross entropy of a category is divided by the logarithm of its number of ids, so that a guess costs
    about 1, like the squared error of a standardized number.

    Args:
        numbers: M.
        cardinalities: Number of ids of each category.
    """

    def __init__(self, numbers: int, cardinalities: Sequence[int]) -> None:
        self.numbers, self.cardinalities = numbers, tuple(cardinalities)

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if output.dim() == 3:  # ensemble members in training mode
            members = output.shape[1]
            rows = self(output.flatten(0, 1), target.repeat_interleave(members, dim=0))
            return rows.view(-1, members).mean(1)
        rows = _squares(output[:, : self.numbers], target[:, : self.numbers]).sum(1)
        start = self.numbers
        for column, count in enumerate(self.cardinalities):
            ids = target[:, self.numbers + column].long()
            losses = _cross_entropy(output[:, start : start + count], ids)
            rows, start = rows + losses / math.log(max(2, count)), start + count
        return rows

    def row_weights(self, target: torch.Tensor) -> torch.Tensor:
        numbers, ids = target[:, : self.numbers], target[:, self.numbers :]
        return ((~numbers.isnan()).sum(1) + (ids != IGNORED).sum(1)).float()


def _squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    known = ~target.isnan()
    # A zero before the square: the gradient of NaN times 0 is NaN.
    values: torch.Tensor = (output - target.nan_to_num()).masked_fill(~known, 0.0).square()
    return values if values.dim() > 1 else values[:, None]


def _cross_entropy(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.movedim(-1, 1), ids, reduction="none", ignore_index=IGNORED)
