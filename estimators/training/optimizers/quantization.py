"""Blockwise dynamic quantization to 8 bits (Dettmers et al. 2022, section 2).

Values are divided by the largest magnitude of their block and rounded to the nearest of 256 levels, which
are denser near 0: each of seven decades has linear fractions, twice as many as the decade below.
"""

from __future__ import annotations

import torch

BLOCK_SIZE = 256
DECADES = 7


def levels(signed: bool) -> list[float]:
    """Returns the 256 levels in ascending order, from about -1 (0 if unsigned) to 1."""
    positive = []
    for decade in range(DECADES):
        # Unsigned levels use the sign's bit for the fraction.
        count = 2**decade if signed else 2 ** (decade + 1)
        scale = 10.0 ** (decade - DECADES + 1)
        positive += [scale * (0.1 + 0.9 * (i + 0.5) / count) for i in range(count)]
    negative = [-value for value in positive] if signed else []
    return sorted([*negative, 0.0, *positive, 1.0])


def num_blocks(num_values: int) -> int:
    """Returns the number of blocks of a tensor; the last may be short."""
    return -(-num_values // BLOCK_SIZE)


class Quantizer:
    """Converts 1-D fp32 values to codes (one byte each) and scales (fp32, one per block), and back."""

    def __init__(self, signed: bool, device: torch.device) -> None:
        self._signed = signed
        table = torch.tensor(levels(signed), dtype=torch.float32, device="cpu")
        # The code of each of the 65,536 fp16 numbers: a look-up is ten times as fast as a search among the
        # levels, and fp16 is precise enough for all of them.
        halves = torch.arange(-(2**15), 2**15, device="cpu").to(torch.int16).view(torch.float16)
        codes = torch.bucketize(halves.float().nan_to_num(), (table[1:] + table[:-1]) / 2)
        self._levels, self._codes = table.to(device), codes.to(torch.uint8).to(device)

    def quantize(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rounds values to codes and scales; unsigned values never round down to 0.

        If only the second moment became 0, Adam would divide the first by epsilon and take a huge step.
        Rounded up, it makes the step too small instead.
        """
        blocks = _blocks(values)
        scales = blocks.abs().amax(1)  # (blocks,)
        blocks = blocks / torch.where(scales > 0, scales, 1.0)[:, None]
        index = blocks.half().view(torch.int16).view(-1).int().add_(2**15)
        codes = self._codes.index_select(0, index)
        if not self._signed:
            codes.clamp_(min=1).mul_(blocks.view(-1) > 0)
        return codes[: len(values)], scales

    def dequantize(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Returns the values of codes and scales; a scale of 0 gives zeros for any codes."""
        values = self._levels.index_select(0, codes.int())
        return (_blocks(values) * scales[:, None]).view(-1)[: len(codes)]


def _blocks(values: torch.Tensor) -> torch.Tensor:
    """Returns the values as (blocks, BLOCK_SIZE); zeros fill the last block."""
    missing = num_blocks(len(values)) * BLOCK_SIZE - len(values)
    if missing:
        values = torch.nn.functional.pad(values, (0, missing))
    return values.view(-1, BLOCK_SIZE)
