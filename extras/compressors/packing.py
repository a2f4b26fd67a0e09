"""Splits numbers into buckets, and packs codes of a few bits each into bytes."""

from __future__ import annotations

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
