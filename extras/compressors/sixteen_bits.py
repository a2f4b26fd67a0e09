"""Sends gradients as 16-bit numbers, rounded to nearest, and sums them in the gradients' own dtype."""

from __future__ import annotations

from typing import ClassVar

import torch

from ringspark.estimators.collectives.base import Collective
from ringspark.extras.compressors.base import Compressor, Sent, generator_for
from ringspark.extras.compressors.two_rounds import GradientCodec, all_reduce_codes, as_bytes

# An fp16 message begins with the factor of its numbers, in fp32.
_HEAD = 4
# The largest number is scaled below 2 to this power, so that nothing overflows: fp16 ends at 65504.
_TOP = 15
# Range of the factor's exponent: the factor must be a normal fp32 number, and its product with the largest
# number finite.
_POWERS = (-126, 100)


class _Fp16:
    """fp16, with 10 bits of fraction. Values are scaled by a power of 2 against underflow and overflow."""

    def num_bytes(self, elements: int) -> int:
        return _HEAD + 2 * elements

    def encode(self, values: torch.Tensor, random: torch.Generator) -> torch.Tensor:
        largest = values.abs().max() if len(values) else values.new_zeros(())
        _, exponent = torch.frexp(largest)
        factor = torch.ldexp(torch.ones_like(largest), (_TOP - exponent).clamp(*_POWERS))
        return torch.cat([as_bytes(factor.float()), as_bytes((values * factor).half())])

    def decode(self, code: torch.Tensor, elements: int, dtype: torch.dtype) -> torch.Tensor:
        # A copy, because a slice of a message may be unaligned.
        factor, values = code[:_HEAD].clone().view(torch.float32), code[_HEAD:].clone().view(torch.half)
        return values.to(dtype) / factor.to(dtype)


class _Bf16:
    """bf16, with 7 bits of fraction and the range of fp32."""

    def num_bytes(self, elements: int) -> int:
        return 2 * elements

    def encode(self, values: torch.Tensor, random: torch.Generator) -> torch.Tensor:
        return as_bytes(values.bfloat16())

    def decode(self, code: torch.Tensor, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return code.clone().view(torch.bfloat16).to(dtype)


class _SixteenBits(Compressor):
    codec: ClassVar[GradientCodec]

    def sum(self, vector: torch.Tensor, collective: Collective, step: int) -> Sent:
        random = generator_for(vector)
        return all_reduce_codes(vector, self.codec, collective, random, has_feedback=self.has_feedback)


class Fp16Compressor(_SixteenBits):
    """Sends fp16 numbers; each slice of the vector has its own scale factor.

    Rounds the gradients and the sums, each with a relative error of at most 2^-11.
    """

    codec = _Fp16()


class Bf16Compressor(_SixteenBits):
    """Sends bf16 numbers. Rounds the gradients and the sums, each with a relative error of at most 2^-8."""

    codec = _Bf16()
