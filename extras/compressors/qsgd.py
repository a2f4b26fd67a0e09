"""Few levels a number, rounded at random so that the mean is right (Alistarh et al. 2017, "QSGD")."""

from __future__ import annotations

import torch

from ringspark.estimators.collectives.base import Collective
from ringspark.estimators.collectives.compressors.base import Compressor, Sent, generator_for
from ringspark.estimators.collectives.compressors.two_rounds import as_bytes, sum_of_codes
from ringspark.extras.compressors.packing import in_buckets, pack, unpack

# Numbers with one largest size: 4 bytes beside 256 at 4 bits.
_BUCKET = 512


class _Levels:
    """Levels from -s to s of the bucket's largest size; 2 s + 1 of them fit in the bits."""

    def __init__(self, bits: int) -> None:
        self._bits = bits
        self._top = 2 ** (bits - 1) - 1

    def num_bytes(self, elements: int) -> int:
        buckets = -(-elements // _BUCKET)
        return 4 * buckets + _BUCKET * self._bits // 8 * buckets

    def encode(self, values: torch.Tensor, random: torch.Generator) -> torch.Tensor:
        buckets = in_buckets(values, _BUCKET)
        sizes = buckets.abs().amax(1).float()
        # The size is rounded to fp32, which may leave a number of fp64 above it.
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
    """A number as one of 2^bits - 1 levels. Unbiased; the variance grows as the levels become few."""

    unbiased = True

    def sum(self, vector: torch.Tensor, collective: Collective, step: int) -> Sent:
        random = generator_for(vector, self.seed, step, collective.rank)
        levels = _Levels(self.options.bits)
        return sum_of_codes(vector, levels, collective, random, has_feedback=self.has_feedback)
