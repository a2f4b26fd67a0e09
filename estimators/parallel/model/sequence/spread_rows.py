"""A network's rows where each rank has a part of the tokens.

Every rank reads whole rows, takes its tokens, and sees the whole outputs: so losses and metrics are those
of one worker. What a rank's weights did to its own tokens gives a part of their gradient, and the parts are
summed over the ranks. Weights behind `pool` work on whole rows on every rank: there the gradients are
divided by the number of ranks, so that their sum counts each row once, and `pool` multiplies by it again on
the way to the tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel.model.communication import scaled_gradient, summed
from ringspark.estimators.parallel.model.sequence.spans import Spans
from ringspark.models.whole_rows import WholeRows


class SpreadRows(WholeRows):
    """Takes the place of `WholeRows`, on every rank of the collective, whose ranks read the same rows."""

    is_spread = True

    def __init__(self, collective: Collective, spans: Spans) -> None:
        self._collective, self._spans = collective, spans

    def __deepcopy__(self, memo: dict[int, Any]) -> SpreadRows:
        # A copy of a network stays in its gang.
        return self

    def own(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return self._spans.taken(x, dim, self._collective.rank)

    def mask(self, mask: torch.Tensor | None, seq: int) -> torch.Tensor:
        # A mask of no rows, whose shape alone is looked at, tells the number of tokens at no cost.
        return torch.empty((0, 1, 1, seq), dtype=torch.bool) if mask is None else mask

    def told(self, tokens: torch.Tensor | None, seq: int) -> torch.Tensor:
        # As with a mask.
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
        return scaled_gradient(outputs, 1 / self._collective.size)

    def joined(self, x: torch.Tensor, dim: int, seq: int) -> torch.Tensor:
        whole: torch.Tensor = _Joined.apply(x, dim, seq, self._collective, self._spans)  # type: ignore[no-untyped-call]
        return whole

    def _total(self, x: torch.Tensor) -> torch.Tensor:
        """Sums over the ranks, which have equal shares of the gradient: their sum needs no exchange."""
        return scaled_gradient(summed(x, self._collective), self._collective.size)


class _Joined(torch.autograd.Function):
    """Gathers all tokens; of their gradient, which all ranks know, each takes that of its own."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dim: int, seq: int, collective: Collective, spans: Spans
    ) -> torch.Tensor:
        ctx.dim, ctx.rank, ctx.spans = dim, collective.rank, spans
        shapes = [(*x.shape[:dim], n, *x.shape[dim + 1 :]) for n in spans.lengths(seq)]
        counts = [torch.Size(shape).numel() for shape in shapes]
        pieces = collective.all_gather(x.contiguous().view(-1), counts)
        return spans.in_order([p.view(shape) for p, shape in zip(pieces, shapes, strict=True)], dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.spans.taken(gradient, ctx.dim, ctx.rank), None, None, None, None
