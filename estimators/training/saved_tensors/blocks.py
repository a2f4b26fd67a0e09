"""Stores values in eight bits with one fp32 scale per block of 256: "int8" and "fp8", both lossy.

The largest finite magnitude of a block becomes the largest finite code: ±126 of int8, ±416 of fp8 e4m3.
The remaining codes are +Inf, -Inf and NaN, which are kept and do not affect their block: a loss scaler must
still see an overflow, and a mask of -Inf must stay one.

The error of a finite value is at most 1/252 of the block's largest magnitude with int8. With fp8 it is at
most 1/16 of the value itself, unless that is below 1/26,000 of the block's largest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch

BLOCK = 256
# Values converted at a time, so that temporaries stay small compared with the result.
_CHUNK = 1024 * BLOCK
_FP8 = torch.float8_e4m3fn
_LARGEST = {"int8": 126.0, "fp8": 416.0}

BlockFormat = Literal["int8", "fp8"]


def quantise(values: torch.Tensor, block_format: BlockFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Converts floating values (n,) to codes, bytes (n,), and scales, fp32 (ceil(n / BLOCK),)."""
    count = values.numel()
    codes = torch.empty(count, dtype=torch.uint8, device=values.device)
    scales = torch.empty(-(-count // BLOCK), dtype=torch.float32, device=values.device)
    for start, stop in _chunks(count):
        chunk = torch.zeros(-(-(stop - start) // BLOCK) * BLOCK, device=values.device)
        chunk[: stop - start] = values[start:stop]
        blocks = chunk.view(-1, BLOCK)
        largest = blocks.abs().nan_to_num_(nan=0.0, posinf=0.0).amax(1)
        # A block of zeros would divide by zero.
        scale = largest.div_(_LARGEST[block_format]).clamp_min_(torch.finfo(torch.float32).tiny)
        encoded = _encode(blocks.div_(scale[:, None]), block_format)
        codes[start:stop] = encoded.view(-1)[: stop - start]
        scales[start // BLOCK : -(-stop // BLOCK)] = scale
    return codes, scales


def dequantise(
    codes: torch.Tensor, scales: torch.Tensor, block_format: BlockFormat, dtype: torch.dtype
) -> torch.Tensor:
    """Undoes `quantise` except for the rounding; returns (n,) in `dtype`."""
    count = codes.numel()
    table = _table(block_format, codes.device)
    values = torch.empty(count, dtype=dtype, device=codes.device)
    for start, stop in _chunks(count):
        chunk = table.index_select(0, codes[start:stop].to(torch.int32))
        whole = (stop - start) // BLOCK * BLOCK
        first = start // BLOCK
        chunk[:whole].view(-1, BLOCK).mul_(scales[first : first + whole // BLOCK, None])
        if whole < stop - start:
            chunk[whole:].mul_(scales[-1])
        values[start:stop] = chunk
    return values


def _chunks(count: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + _CHUNK, count)) for start in range(0, count, _CHUNK))


def _encode(scaled: torch.Tensor, block_format: BlockFormat) -> torch.Tensor:
    if block_format == "fp8":
        # 448, the code after 416, stands for Inf and for no finite value. NaN stays NaN.
        return scaled.clamp_(-448, 448).to(_FP8).view(torch.uint8)
    # Code 0 is NaN, 1 and 255 are -Inf and +Inf, 128 is zero.
    return scaled.round_().nan_to_num_(nan=-128.0, posinf=127.0, neginf=-127.0).add_(128).to(torch.uint8)


def _table(block_format: BlockFormat, device: torch.device) -> torch.Tensor:
    """Returns the value of each of the 256 codes in units of its block's scale."""
    codes = torch.arange(256, device=device, dtype=torch.uint8)
    if block_format == "fp8":
        values, beyond = codes.view(_FP8).float(), 448.0
    else:
        values, beyond = codes.float() - 128, 127.0
        values = values.masked_fill(values < -beyond, torch.nan)
    return torch.where(values.abs() == beyond, values * torch.inf, values)
