"""QSGD: rounds each number at random to one of a few levels; unbiased (Alistarh et al. 2017)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringspark.estimators.options.compression import QSGD
from ringspark.extras.compressors.packing import in_buckets, pack, unpack
from ringspark.extras.compressors.two_rounds import CodedCompressor, as_bytes

# Numbers per scale: 4 bytes for 256 bytes of codes at 4 bits.
_BUCKET = 512


class QsgdCompressor(CodedCompressor):
    """Sends each number as one of 2^bits - 1 levels; unbiased.

    The levels run from -s to s, scaled by the largest magnitude in the bucket.
    """

    def __init__(self, shapes: Sequence[torch.Size], seed: int, options: QSGD) -> None:
        super().__init__(shapes, seed, options)
        self._bits = options.bits
        self._top = 2 ** (options.bits - 1) - 1

    def encode(self, values: torch.Tensor, random: torch.Generator) -> torch.Tensor:
        buckets = in_buckets(values, _BUCKET)
        sizes = buckets.abs().amax(1).float()
        # The scale is rounded to fp32, so an fp64 number may exceed it.
        scaled = (
            buckets / sizes.to(buckets.dtype).clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        ).clamp(-1, 1) * self._top
        chance = torch.rand(buckets.shape, generator=random, dtype=buckets.dtype, device=buckets.device)
        levels = (scaled + chance).floor() + self._top
        return torch.cat([as_bytes(sizes), pack(levels.to(torch.uint8).view(-1), self._bits)])

    def decode(self, code: torch.Tensor, elements: int, dtype: torch.dtype) -> torch.Tensor:
        end = 4 * -(-elements // _BUCKET)
        sizes = code[:end].clone().view(torch.float32).to(dtype)
        levels = unpack(code[end:], self._bits).view(-1, _BUCKET).to(dtype) - self._top
        values: torch.Tensor = levels * (sizes / self._top)[:, None]
        return values.view(-1)[:elements]
