"""The tokens of a row that each rank has: one span, or two spans that balance causal attention.

In causal attention the last tokens need the most work. So each rank gets one span from the front of the row,
and the mirrored span from the back (zig-zag).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel.shard_spec import shard_range

# First token, and end.
Span = tuple[int, int]


@dataclass(frozen=True)
class Spans:
    """Assigns a row's tokens to ranks; with `zigzag`, each gets a span of the front and one of the back."""

    num_ranks: int
    zigzag: bool = False

    def of(self, rank: int, seq: int) -> list[Span]:
        """Returns a rank's spans of a row of `seq` tokens, in order; a span may be empty."""
        if not self.zigzag:
            return [shard_range(seq, rank, self.num_ranks)]
        number = 2 * self.num_ranks
        return [shard_range(seq, rank, number), shard_range(seq, number - 1 - rank, number)]

    def lengths(self, seq: int) -> list[int]:
        return [sum(end - begin for begin, end in self.of(rank, seq)) for rank in range(self.num_ranks)]

    def take(self, x: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
        return torch.cat(
            [x.narrow(dim, begin, end - begin) for begin, end in self.of(rank, x.shape[dim])], dim
        )

    def join(self, parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        seq = sum(part.shape[dim] for part in parts)
        pieces: list[tuple[Span, torch.Tensor]] = []
        for rank, part in enumerate(parts):
            spans = self.of(rank, seq)
            pieces += zip(spans, torch.split(part, [end - begin for begin, end in spans], dim), strict=True)
        return torch.cat([piece for _, piece in sorted(pieces, key=lambda item: item[0])], dim)

    def gather(self, x: torch.Tensor, dim: int, seq: int, collective: Collective) -> torch.Tensor:
        """All-gathers each rank's tokens along `dim`; returns all `seq` tokens in order."""
        shapes = [(*x.shape[:dim], n, *x.shape[dim + 1 :]) for n in self.lengths(seq)]
        pieces = collective.all_gather(x.contiguous().view(-1), [math.prod(shape) for shape in shapes])
        return self.join([p.view(shape) for p, shape in zip(pieces, shapes, strict=True)], dim)
