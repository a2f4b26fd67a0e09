"""Averages a vector over the ranks in 32, 16 or 8 bits an element.

For 16 and 8 bits the ranks first agree on the largest magnitude m of each parameter's piece (one number a
parameter), then sum what is left of the elements in that format. With n ranks, an element of the average is
off by at most

- fp16: m n / 4,096: each rank sends its n-th part, rounded, and each addition rounds again;
- int8: m / (2 floor(127 / n)): the sum of n whole numbers must stay within 127, so each has floor(127 / n)
  levels on either side. Half of a level is what a rank's rounding can cost.

A value that is not finite makes its whole piece NaN on all ranks, so the next loss tells of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ringspark.estimators.collectives import Collective

INT8_MOST = 127


@torch.no_grad()
def start_average(
    values: torch.Tensor, sizes: Sequence[int], collective: Collective, form: str, name: str
) -> Callable[[], torch.Tensor]:
    """Begins to average `values`, 1-D, over all ranks. Runs on every rank.

    Args:
        values: They must not be used afterwards.
        sizes: Elements of each piece with a scale of its own.
        form: "fp32" (which keeps fp64), "fp16" or "int8".
        name: See `Collective.start_sum`.

    Returns:
        A function that waits and returns the average; bitwise equal on all ranks.
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
    largest = collective.all_reduce(largest, op="max")
    # NaN is not above 0, and comes back by the multiplication at the end.
    divisor = torch.where(largest > 0, largest, torch.ones_like(largest))
    levels = INT8_MOST // count if form == "int8" else 1
    for piece, by in zip(pieces, divisor, strict=True):
        piece.div_(by).mul_(levels if form == "int8" else 1 / count)
    sent = values.round_().to(torch.int8) if form == "int8" else values.half()
    wait = collective.start_sum(sent, name)

    def compact() -> torch.Tensor:
        wait()
        average = sent.to(values.dtype)
        for piece, scale in zip(torch.split(average, list(sizes)), largest, strict=True):
            piece.mul_(scale / (levels * count) if form == "int8" else scale)
        return average

    return compact
