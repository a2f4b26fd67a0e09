"""Deviances: how far a positive mean is from a label that is a count or a positive amount.

The power p of a deviance says that the variance of the label grows like mean^p: 1 for Poisson counts, 2 for
gamma amounts, and 1 < p < 2 for Tweedie's sums of amounts, of which many are 0. Jorgensen 1987, "Exponential
Dispersion Models".
"""

from __future__ import annotations

import math
import re

import torch
from torch import nn

POWERS = {"poisson": 1.0, "tweedie": 1.5, "gamma": 2.0}
_NAME = re.compile(r"poisson|gamma|tweedie(?:_(\d+(?:\.\d+)?))?")


def find_power(loss: object) -> float | None:
    """Returns the power of a loss such as "gamma" or "tweedie_1.7_per_member"; None for other losses.

    Raises ValueError for a power of "tweedie" that is not between 1 and 2.
    """
    found = _NAME.fullmatch(family_of(loss)) if isinstance(loss, str) else None
    if found is None:
        return None
    power = float(found[1] or POWERS[found[0].partition("_")[0]])
    if found[1] and not 1 < power < 2:
        raise ValueError(
            f"{loss!r} needs a power between 1 and 2, as in 'tweedie_1.5', got {power:g}; take 'poisson' for "
            "1 and 'gamma' for 2"
        )
    return power


def family_of(loss: str) -> str:
    """Returns the name of a loss without the suffix of a loss per member."""
    return loss.removesuffix("_per_member")


def check_range(label: str, loss: str, least: float) -> None:
    """Raises ValueError if the least label is impossible for a loss that is a deviance."""
    power = find_power(loss)
    if power is not None and (least < 0 or least == 0 == power - 2):
        wanted = "labels above 0" if power == 2 else "labels of 0 or above"
        raise ValueError(
            f"labelCol {label!r} has the value {least:g}, but loss {family_of(loss)!r} takes {wanted}; drop "
            "such rows, or set another loss"
        )


def half_deviance(mean: torch.Tensor, label: torch.Tensor, power: float) -> torch.Tensor:
    """Returns half of each element's unit deviance, 0 where mean and label are equal.

    NaN for a negative mean. A mean of 0 counts as the smallest number above 0.
    """
    known = mean.masked_fill(mean < 0, math.nan)
    # By the logarithm: powers of a tiny mean would overflow in the gradient.
    log = known.clamp_min(torch.finfo(mean.dtype).tiny).log()
    if power == 1:
        return known - label + torch.xlogy(label, label) - label * log
    if power == 2:
        return label * (-log).exp() + log - label.log() - 1
    one, two = 1 - power, 2 - power
    return (two * log).exp() / two - label * (one * log).exp() / one + label**two / (one * two)


class Deviance(nn.Module):
    """`half_deviance` as a loss; its gradient is the gradient of the negative log-likelihood."""

    reduction = "mean"

    def __init__(self, power: float) -> None:
        super().__init__()
        self.power = power

    def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return half_deviance(output, label, self.power)
