"""Which tokens of a row each rank has: one piece, or two that make causal attention even.

Where every token sees only those before it, the rank with the last tokens would have most to do. So a row
is cut into twice as many pieces as there are ranks, and each rank gets one from the front and its mirror
image from the back (zig-zag): every rank then has the same number of pairs to attend to.

Invariant: the pieces hold every token once, and two pieces of a row are equal or have no token in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ringspark.estimators.parallel.cut import length_of_part

# First token, and the one behind the last.
Span = tuple[int, int]


@dataclass(frozen=True)
class Spans:
    """The tokens of each rank.

    Attributes:
        num_ranks: Number of ranks that a row is spread over.
        zigzag: Whether each rank has two pieces, one from the front and one from the back.
    """

    num_ranks: int
    zigzag: bool = False

    def of(self, rank: int, seq: int) -> list[Span]:
        """Returns a rank's pieces of a row of `seq` tokens, in their order; a piece may be empty."""
        if not self.zigzag:
            return [_piece(rank, self.num_ranks, seq)]
        number = 2 * self.num_ranks
        return [_piece(rank, number, seq), _piece(number - 1 - rank, number, seq)]

    def lengths(self, seq: int) -> list[int]:
        """Returns each rank's number of tokens."""
        return [sum(end - begin for begin, end in self.of(rank, seq)) for rank in range(self.num_ranks)]

    def taken(self, x: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
        """Returns a rank's tokens of `x`, which has all of them along `dim`."""
        return torch.cat(
            [x.narrow(dim, begin, end - begin) for begin, end in self.of(rank, x.shape[dim])], dim
        )

    def in_order(self, parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """Returns all tokens in their order, from each rank's tokens along `dim`."""
        seq = sum(part.shape[dim] for part in parts)
        pieces: list[tuple[Span, torch.Tensor]] = []
        for rank, part in enumerate(parts):
            spans = self.of(rank, seq)
            pieces += zip(spans, torch.split(part, [end - begin for begin, end in spans], dim), strict=True)
        return torch.cat([piece for _, piece in sorted(pieces, key=lambda item: item[0])], dim)


def _piece(index: int, number: int, seq: int) -> Span:
    """Returns one of `number` pieces; the first ones have one token more where they are uneven."""
    begin = index * (seq // number) + min(index, seq % number)
    return begin, begin + length_of_part(seq, index, number)
