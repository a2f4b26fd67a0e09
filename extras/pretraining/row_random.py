"""Random numbers that depend on a row's own values, so that the number of ranks does not change them.

Each number is a hash of the row, its position and a seed (the mixing function of SplitMix64, Steele, Lea and
Flood 2014). Rows with equal values get equal numbers in the same step, and other numbers in the next step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
_FACTORS = (-4658895280553007687, -7723592293110705685)


def row_keys(values: Sequence[torch.Tensor], seed: int) -> torch.Tensor:
    """Returns a hash of each row and the seed, (rows,) int64. `values` are tensors (rows, ...)."""
    keys = torch.full((len(values[0]),), seed, dtype=torch.int64, device=values[0].device)
    for tensor in values:
        flat = tensor.flatten(1) if tensor.dim() > 1 else tensor[:, None]
        # Equal numbers have equal bits: adding 0 turns -0.0 into 0.0.
        is_float = tensor.is_floating_point()
        bits = (flat.float() + 0.0).contiguous().view(torch.int32).long() if is_float else flat.long()
        places = _mix(torch.arange(bits.shape[1], device=bits.device) + 1)
        keys = _mix(keys + _mix(bits + places).sum(1))
    return keys


def uniform(keys: torch.Tensor, shape: Sequence[int], stream: int) -> torch.Tensor:
    """Returns numbers in (0, 1), (rows, *shape) fp32. Different `stream`s are independent."""
    count = math.prod(shape)
    places = torch.arange(count, device=keys.device) + (stream << 40)
    hashes = _mix(keys[:, None] + _mix(places * _GOLDEN))
    return to_unit(hashes).reshape(len(keys), *shape)


def to_unit(hashes: torch.Tensor) -> torch.Tensor:
    """Returns numbers in (0, 1) from int64 hashes."""
    # The upper 23 bits, in the middle of their interval: fp32 would round the middle of the last of 2^24
    # intervals to 1, which is infinite as a normal number.
    return (((hashes >> 41) & 0x7FFFFF).float() + 0.5) / (1 << 23)


def normal(keys: torch.Tensor, shape: Sequence[int], stream: int) -> torch.Tensor:
    """Returns numbers with the standard normal distribution, (rows, *shape) fp32."""
    return math.sqrt(2) * torch.erfinv(2 * uniform(keys, shape, stream) - 1)


def _mix(values: torch.Tensor) -> torch.Tensor:
    values = values + _GOLDEN
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        # A logical shift: torch's own keeps the sign.
        values = (values ^ ((values >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return values ^ ((values >> 31) & ((1 << 33) - 1))
