"""Splits numbers into buckets, and packs codes of a few bits each into bytes."""

from __future__ import annotations

import numpy as np
import torch


def in_buckets(values: torch.Tensor, bucket: int) -> torch.Tensor:
    missing = -len(values) % bucket
    return torch.nn.functional.pad(values, (0, missing)).view(-1, bucket)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs uint8 integers, each below 2^bits, into bytes; a byte's lowest bits hold its first integer."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (codes.view(-1, 8 // bits) << shifts).sum(1, dtype=torch.uint8)


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    codes: torch.Tensor = (packed[:, None] >> shifts) & (2**bits - 1)
    return codes.view(-1)


def pack_integers(integers: np.ndarray, bits: int) -> torch.Tensor:
    """Packs integers, each below 2^bits, into bytes without gaps; `bits` is up to 62."""
    columns = np.empty((len(integers), bits), np.uint8)
    for bit in range(bits):
        columns[:, bit] = (integers >> bit) & 1
    return torch.from_numpy(np.packbits(columns))


def unpack_integers(packed: torch.Tensor, bits: int, count: int) -> np.ndarray:
    """Returns the `count` integers that `pack_integers` packed."""
    columns = np.unpackbits(packed.cpu().numpy(), count=count * bits).reshape(count, bits)
    integers = np.zeros(count, np.int64)
    for bit in range(bits):
        integers |= columns[:, bit].astype(np.int64) << bit
    return integers
