"""Sends gradients as 16-bit numbers, rounded to nearest, and sums them in the gradients' own dtype."""

from __future__ import annotations

import torch

from ringspark.extras.compressors.two_rounds import CodedCompressor, as_bytes

# An fp16 message begins with the factor of its numbers, in fp32.
_HEAD = 4
# The largest number is scaled below 2 to this power, so that nothing overflows: fp16 ends at 65504.
_TOP = 15
# Range of the factor's exponent: the factor must be a normal fp32 number, and its product with the largest
# number finite.
_POWERS = (-126, 100)


class Fp16Compressor(CodedCompressor):
    """Sends fp16 numbers; each slice of the vector has its own scale factor.

    Rounds the gradients and the sums, each with a relative error of at most 2^-11. The scale factor is a
    power of 2, against underflow and overflow.
    """

    def encode(self, values: torch.Tensor, random: torch.Generator) -> torch.Tensor:
        largest = values.abs().max() if len(values) else values.new_zeros(())
        _, exponent = torch.frexp(largest)
        factor = torch.ldexp(torch.ones_like(largest), (_TOP - exponent).clamp(*_POWERS))
        return torch.cat([as_bytes(factor.float()), as_bytes((values * factor).half())])

    def decode(self, code: torch.Tensor, elements: int, dtype: torch.dtype) -> torch.Tensor:
        # A copy, because a slice of a message may be unaligned.
        factor, values = code[:_HEAD].clone().view(torch.float32), code[_HEAD:].clone().view(torch.half)
        return values.to(dtype) / factor.to(dtype)


class Bf16Compressor(CodedCompressor):
    """Sends bf16 numbers. Rounds the gradients and the sums, each with a relative error of at most 2^-8."""

    def encode(self, values: torch.Tensor, random: torch.Generator) -> torch.Tensor:
        return as_bytes(values.bfloat16())

    def decode(self, code: torch.Tensor, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return code.clone().view(torch.bfloat16).to(dtype)
