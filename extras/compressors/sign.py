"""Signs: sends one bit per number, scaled by the mean magnitude in its bucket.

Karimireddy et al. 2019, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes".
"""

from __future__ import annotations

import torch

from ringspark.extras.compressors.packing import in_buckets, pack, unpack
from ringspark.extras.compressors.two_rounds import CodedCompressor, as_bytes

# Numbers per scale: 4 bytes for 256 bytes of signs.
_BUCKET = 2048


class SignCompressor(CodedCompressor):
    """Sends the sign of each number.

    Without error feedback the loss may grow, because rare large gradients lose their size.
    """

    def encode(self, values: torch.Tensor, random: torch.Generator) -> torch.Tensor:
        buckets = in_buckets(values, _BUCKET)
        # The padding of the last bucket does not count.
        counts = torch.full((len(buckets),), _BUCKET, device=values.device)
        counts[-1:] -= -len(values) % _BUCKET
        means = (buckets.abs().sum(1) / counts).float()
        return torch.cat([as_bytes(means), pack((buckets >= 0).to(torch.uint8).view(-1), 1)])

    def decode(self, code: torch.Tensor, elements: int, dtype: torch.dtype) -> torch.Tensor:
        end = 4 * -(-elements // _BUCKET)
        means = code[:end].clone().view(torch.float32).to(dtype)
        signs = unpack(code[end:], 1).view(-1, _BUCKET).to(dtype).mul_(2).sub_(1)
        return (signs * means[:, None]).view(-1)[:elements]
