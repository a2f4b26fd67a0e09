"""Attention to keys and values gathered from all ranks: the fewest messages.

Each attention needs an all-gather in the forward pass and a reduce-scatter in the backward pass. It keeps the
rank's queries, and keys and values of whole rows, for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ringspark.estimators.parallel.model.sequence.context import Context
from ringspark.estimators.parallel.model.sequence.span_attention import Queries, SpanAttention, SpanGradients


class AllGatherKeys(Context):
    """All-gathers keys and values."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        seq: int,
        dropout: float,
        causal: bool,
    ) -> torch.Tensor:
        mixed: torch.Tensor = _AllGatherAttention.apply(query, key, value, self, mask, seq, causal)  # type: ignore[no-untyped-call]
        return mixed

    def gather(self, key: torch.Tensor, value: torch.Tensor, seq: int) -> torch.Tensor:
        """Returns keys and values of all tokens in order, (2, batch, heads, seq, head_dim)."""
        own = torch.stack([key, value])
        lengths = self.spans.lengths(seq)
        width = own.shape[:3].numel() * own.shape[4]
        pieces = self.collective.all_gather(own.view(-1), [n * width for n in lengths])
        parts = [
            piece.view(*own.shape[:3], n, own.shape[4]) for n, piece in zip(lengths, pieces, strict=True)
        ]
        return self.spans.join(parts, 3)

    def scatter(self, gradient: torch.Tensor, seq: int) -> torch.Tensor:
        """Sums the gradients over ranks, and returns the gradients of this rank's keys and values."""
        size, rank = self.collective.size, self.collective.rank
        parts = [self.spans.take(gradient, 3, r) for r in range(size)]
        flat = torch.cat([part.reshape(-1) for part in parts])
        own = self.collective.start_reduce_scatter(flat, [part.numel() for part in parts])()
        return own.view(parts[rank].shape)


class _AllGatherAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: AllGatherKeys,
        mask: torch.Tensor | None,
        seq: int,
        causal: bool,
    ) -> torch.Tensor:
        both = context.gather(key, value, seq)
        queries = Queries(
            query=query, spans=context.spans.of(context.collective.rank, seq), mask=mask, causal=causal
        )
        attention = SpanAttention(queries=queries)
        attention.add(both[0], both[1], [(0, seq)])
        mixed, log_sum = attention.result()
        ctx.context, ctx.causal, ctx.seq = context, causal, seq
        ctx.save_for_backward(query, both, mixed, log_sum, mask)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        query, both, mixed, log_sum, mask = ctx.saved_tensors
        context, seq = ctx.context, ctx.seq
        spans = context.spans.of(context.collective.rank, seq)
        queries = Queries(query=query, spans=spans, mask=mask, causal=ctx.causal)
        gradients = SpanGradients(queries, gradient, (mixed.to(log_sum.dtype), log_sum))
        found = torch.zeros_like(both, dtype=log_sum.dtype)
        gradients.add(both[0], both[1], [(0, seq)], found)
        key, value = context.scatter(found, seq).to(query.dtype)
        return gradients.query.to(query.dtype), key, value, None, None, None, None
