"""QSGD: rounds each number at random to one of a few levels; unbiased (Alistarh et al. 2017)."""

from __future__ import annotations

import torch

from ringspark.estimators.collectives.base import Collective
from ringspark.extras.compressors.base import Compressor, Sent, generator_for
from ringspark.extras.compressors.packing import in_buckets, pack, unpack
from ringspark.extras.compressors.two_rounds import all_reduce_codes, as_bytes

# Numbers per scale: 4 bytes for 256 bytes of codes at 4 bits.
_BUCKET = 512


class _Levels:
    """Encodes numbers as 2 s + 1 levels from -s to s, scaled by the largest magnitude in the bucket."""

    def __init__(self, bits: int) -> None:
        self._bits = bits
        self._top = 2 ** (bits - 1) - 1

    def num_bytes(self, elements: int) -> int:
        buckets = -(-elements // _BUCKET)
        return 4 * buckets + _BUCKET * self._bits // 8 * buckets

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


class QsgdCompressor(Compressor):
    """Sends each number as one of 2^bits - 1 levels; unbiased."""

    unbiased = True

    def sum(self, vector: torch.Tensor, collective: Collective, step: int) -> Sent:
        random = generator_for(vector, self.seed, step, collective.rank)
        levels = _Levels(self.options.bits)
        return all_reduce_codes(vector, levels, collective, random, has_feedback=self.has_feedback)
