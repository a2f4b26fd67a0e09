"""Packs eight booleans into a byte, by tensor arithmetic that also runs on CUDA and on meta.

Eight booleans are eight bytes 0 or 1, so one 64-bit word: a multiplication gathers their bits in its top
byte, and another one spreads a byte over a word again (little-endian, like all machines that run torch).
"""

from __future__ import annotations

import torch

_GATHER = 0x0102040810204080
_SPREAD = 0x0101010101010101
# Byte i of the word keeps bit i; negative, because the word is signed.
_SELECT = 0x8040201008040201 - 2**64


def pack_bits(values: torch.Tensor) -> torch.Tensor:
    """Packs booleans (n,) into bytes (ceil(n / 8),); the first value is the lowest bit of the first byte."""
    padding = -values.numel() % 8
    if padding:
        values = torch.cat([values, values.new_zeros(padding)])
    elif values.storage_offset() % 8:
        values = values.clone()  # a word must begin at a multiple of its size
    return values.view(torch.int64).mul(_GATHER).bitwise_right_shift_(56).to(torch.uint8)


def unpack_bits(packed: torch.Tensor, count: int) -> torch.Tensor:
    """Undoes `pack_bits` for `count` values."""
    words = packed.to(torch.int64).mul_(_SPREAD).bitwise_and_(_SELECT)
    return words.view(torch.uint8)[:count].ne(0)
