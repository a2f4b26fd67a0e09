"""The rows of a network with context parallelism.

Every rank reads whole rows, computes its tokens, and returns whole outputs. A rank's gradients are partial,
and are summed over the ranks. Weights after `pool` compute whole rows on every rank: their gradients are
divided by the number of ranks, so that the sum counts each row once, and `pool` multiplies by this number
again on the way back to the tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel.model.communication import all_reduce, apply_once, scale_gradient
from ringspark.estimators.parallel.model.sequence.spans import Spans
from ringspark.models.whole_rows import WholeRows


class ShardedRows(WholeRows):
    """Replaces `WholeRows` on every rank of the collective; these ranks read the same rows."""

    is_spread = True

    def __init__(self, collective: Collective, spans: Spans) -> None:
        self._collective, self._spans = collective, spans

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedRows:
        # A copied network belongs to the same rank.
        return self

    def own(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return self._spans.take(x, dim, self._collective.rank)

    def mask(self, mask: torch.Tensor | None, seq: int) -> torch.Tensor:
        # The shape of an empty mask has the number of tokens.
        return torch.empty((0, 1, 1, seq), dtype=torch.bool) if mask is None else mask

    def told(self, tokens: torch.Tensor | None, seq: int) -> torch.Tensor:
        # As for `mask`.
        return torch.empty((0, seq), dtype=torch.bool) if tokens is None else tokens

    def pool(self, x: torch.Tensor, tokens: torch.Tensor | None, seq: int) -> torch.Tensor:
        # Sums of many tokens would lose digits in 16 bits.
        wide = torch.promote_types(x.dtype, torch.float32)
        if tokens is None:
            return (self._total(x.sum(1, dtype=wide)) / seq).to(x.dtype)
        real = self.own(tokens, 1).unsqueeze(-1).to(x.dtype)  # (batch, own tokens, 1)
        number = tokens.sum(1, keepdim=True).clamp(min=1)
        return (self._total((x * real).sum(1, dtype=wide)) / number).to(x.dtype)

    def alike(self, outputs: torch.Tensor) -> torch.Tensor:
        return scale_gradient(outputs, 1 / self._collective.size)

    def joined(self, x: torch.Tensor, dim: int, seq: int) -> torch.Tensor:
        return apply_once(
            x,
            lambda x: self._spans.gather(x, dim, seq, self._collective),
            lambda gradient: self._spans.take(gradient, dim, self._collective.rank),  # equal on all ranks
        )

    def _total(self, x: torch.Tensor) -> torch.Tensor:
        """Sums over the ranks; they have equal gradients, so the gradient needs no all-reduce."""
        return scale_gradient(all_reduce(x, self._collective), self._collective.size)
