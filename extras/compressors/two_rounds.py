"""All-reduces encoded vectors: each rank decodes and sums one shard, and sends the sum encoded again.

The algorithm is from Tang et al. 2021, "1-bit Adam". A rank's error includes the error of encoding the sum.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ringspark.estimators.collectives.base import Collective
from ringspark.extras.compressors.base import Sent


class GradientCodec(Protocol):
    """Encodes numbers, (elements,), as bytes, (num_bytes,)."""

    def num_bytes(self, elements: int) -> int:
        """Returns the length of a code, which only depends on the number of elements."""

    def encode(self, values: torch.Tensor, random: torch.Generator) -> torch.Tensor: ...

    def decode(self, code: torch.Tensor, elements: int, dtype: torch.dtype) -> torch.Tensor: ...


def all_reduce_codes(
    vector: torch.Tensor,
    codec: GradientCodec,
    collective: Collective,
    random: torch.Generator,
    *,
    has_feedback: bool,
) -> Sent:
    """Sums the ranks' vectors, but sends only codes; with `has_feedback`, also returns the coding error."""
    size, dtype = collective.size, vector.dtype
    length = -(-len(vector) // size)
    padded = torch.nn.functional.pad(vector, (0, length * size - len(vector)))
    parts = torch.split(padded, length)
    codes = [codec.encode(part, random) for part in parts]
    error = None
    if has_feedback:
        error = padded - torch.cat([codec.decode(code, length, dtype) for code in codes])
    arrived = collective.all_to_all(codes, [codec.num_bytes(length)] * size)
    mine = codec.decode(arrived[0], length, dtype)
    for code in arrived[1:]:
        mine += codec.decode(code, length, dtype)
    answer = codec.encode(mine, random)
    if error is not None:
        torch.split(error, length)[collective.rank].add_(mine).sub_(codec.decode(answer, length, dtype))
    answers = collective.all_gather(answer, [codec.num_bytes(length)] * size)
    total = torch.cat([codec.decode(code, length, dtype) for code in answers])
    return Sent(total[: len(vector)], None if error is None else error[: len(vector)])


def as_bytes(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1).view(torch.uint8)
