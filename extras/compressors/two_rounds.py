"""All-reduces encoded vectors: each rank decodes and sums one shard, and sends the sum encoded again.

The algorithm is from Tang et al. 2021, "1-bit Adam". A rank's error includes the error of encoding the sum.
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from ringspark.estimators.collectives.base import Collective
from ringspark.extras.compressors.base import Compressor, Sent, generator_for


class CodedCompressor(Compressor):
    """Encodes numbers, (elements,), as bytes, (num_bytes,), and all-reduces the codes in two rounds.

    The length of a code depends only on the number of elements.
    """

    @abstractmethod
    def encode(self, values: torch.Tensor, random: torch.Generator) -> torch.Tensor: ...

    @abstractmethod
    def decode(self, code: torch.Tensor, elements: int, dtype: torch.dtype) -> torch.Tensor: ...

    def sum(self, vector: torch.Tensor, collective: Collective, step: int) -> Sent:
        size, dtype = collective.size, vector.dtype
        random = generator_for(vector, self.seed, step, collective.rank)
        length = -(-len(vector) // size)
        padded = torch.nn.functional.pad(vector, (0, length * size - len(vector)))
        codes = [self.encode(part, random) for part in torch.split(padded, length)]
        error = None
        if self.has_feedback:
            error = padded - torch.cat([self.decode(code, length, dtype) for code in codes])
        arrived = collective.all_to_all(codes, [len(codes[0])] * size)
        mine = self.decode(arrived[0], length, dtype)
        for code in arrived[1:]:
            mine += self.decode(code, length, dtype)
        answer = self.encode(mine, random)
        if error is not None:
            torch.split(error, length)[collective.rank].add_(mine).sub_(self.decode(answer, length, dtype))
        answers = collective.all_gather(answer, [len(answer)] * size)
        total = torch.cat([self.decode(code, length, dtype) for code in answers])
        return Sent(total[: len(vector)], None if error is None else error[: len(vector)])


def as_bytes(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1).view(torch.uint8)
