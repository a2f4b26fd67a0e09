"""Averages a vector over the ranks with 32, 16 or 8 bits per element.

With 16 or 8 bits, the elements of each parameter are divided by m, their largest magnitude over all ranks. If
a value is not finite, its whole parameter becomes NaN.

With n ranks, the error of the average is at most m n / 4,096 for fp16. For int8 it is at most m / (2
floor(127 / n)), because the sum of n integers must stay within 127.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ringspark.estimators.collectives import Collective

INT8_MOST = 127
_PER_INT32 = 4


@torch.no_grad()
def start_average(
    values: torch.Tensor, sizes: Sequence[int], collective: Collective, form: str, name: str
) -> Callable[[], torch.Tensor]:
    """Starts to average 1-D `values`, which it overwrites, over all ranks. Runs on every rank.

    Args:
        sizes: Number of elements of each parameter in `values`; each parameter has its own scale.
        form: "fp32", "fp16" or "int8". With "fp32", fp64 values stay fp64.

    Returns:
        A function that waits for the average and returns it; the result is bitwise equal on all ranks.
    """
    count = collective.size
    if form == "fp32":
        wait = collective.start_sum(values, name)

        def whole() -> torch.Tensor:
            wait()
            return values.div_(count)

        return whole
    pieces = torch.split(values, list(sizes))
    largest = torch.stack([p.abs().amax() if len(p) else p.new_zeros(()) for p in pieces])
    # Infinity, because a library's maximum of NaN and a number depends on their order.
    largest = torch.where(largest.isfinite(), largest, torch.inf)
    largest = collective.all_reduce(largest, op="max")
    divisor = torch.where(largest > 0, largest, torch.ones_like(largest))
    scale = torch.where(largest.isfinite(), largest, torch.nan)
    levels = INT8_MOST // count
    for piece, by in zip(pieces, divisor, strict=True):
        piece.div_(by).mul_(levels if form == "int8" else 1 / count)
    sent = _as_bytes(values, levels) if form == "int8" else values.half()
    wait = collective.start_sum(sent, name)

    def compact() -> torch.Tensor:
        wait()
        if form == "int8":
            average = sent.view(torch.uint8)[: len(values)].to(values.dtype)
            average.sub_(levels * count).div_(levels * count)
        else:
            average = sent.to(values.dtype)
        for piece, by in zip(torch.split(average, list(sizes)), scale, strict=True):
            piece.mul_(by)
        return average

    return compact


def _as_bytes(values: torch.Tensor, levels: int) -> torch.Tensor:
    """Rounds values between -`levels` and `levels` to bytes from 0 to 2 `levels`; packs four per int32."""
    padded = torch.zeros(-(-len(values) // _PER_INT32) * _PER_INT32, dtype=torch.uint8, device=values.device)
    # A value that is not finite becomes any number here; the scale makes its parameter NaN.
    padded[: len(values)] = values.nan_to_num_(0.0, 0.0, 0.0).round_().add_(levels).to(torch.uint8)
    return padded.view(torch.int32)
