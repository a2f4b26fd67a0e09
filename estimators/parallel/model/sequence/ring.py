"""Ring attention: keys and values travel around the ranks, so a rank holds the keys of at most two ranks.

Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context". A rank
attends to the keys that it has and sends them to the next rank. The backward pass sends keys and values
around again, together with their gradients, which end at their own rank.

Each attention sends n - 1 messages forward and n backward, and keeps the rank's queries, keys and values.
`Spans` balances causal attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel.model.sequence.context import Context
from ringspark.estimators.parallel.model.sequence.span_attention import Queries, SpanAttention, SpanGradients


class Ring(Context):
    """Sends keys and values around the ranks."""

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
        mixed: torch.Tensor = _RingAttention.apply(query, key, value, self, mask, seq, causal)  # type: ignore[no-untyped-call]
        return mixed

    def source(self, step: int) -> int:
        """Returns the rank whose keys are here after `step` messages."""
        return (self.collective.rank - step) % self.collective.size


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        ring: Ring,
        mask: torch.Tensor | None,
        seq: int,
        causal: bool,
    ) -> torch.Tensor:
        size, spans, lengths = ring.collective.size, ring.spans, ring.spans.lengths(seq)
        own = spans.of(ring.collective.rank, seq)
        attention = SpanAttention(queries=Queries(query=query, spans=own, mask=mask, causal=causal))
        here = torch.stack([key, value])
        for step in range(size):
            source = ring.source(step)
            attention.add(here[0], here[1], spans.of(source, seq))
            if step + 1 < size:
                (here,) = shift([here], 3, lengths[ring.source(step + 1)], ring.collective)
        mixed, log_sum = attention.result()
        ctx.ring, ctx.causal, ctx.seq = ring, causal, seq
        # Not `here`: these three are views of one tensor, which is kept anyway.
        ctx.save_for_backward(query, key, value, mixed, log_sum, mask)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        query, key, value, mixed, log_sum, mask = ctx.saved_tensors
        ring, seq = ctx.ring, ctx.seq
        collective, spans = ring.collective, ring.spans
        size, lengths = collective.size, spans.lengths(seq)
        own = spans.of(collective.rank, seq)
        queries = Queries(query=query, spans=own, mask=mask, causal=ctx.causal)
        gradients = SpanGradients(queries, gradient, (mixed.to(log_sum.dtype), log_sum))
        here = torch.stack([key, value])
        found = torch.zeros_like(here, dtype=log_sum.dtype)
        for step in range(size):
            gradients.add(here[0], here[1], spans.of(ring.source(step), seq), found)
            length = lengths[ring.source(step + 1)]
            if step + 1 < size:
                here, found = shift([here, found], 3, length, collective)
            else:
                (found,) = shift([found], 3, length, collective)
        key, value = found.to(query.dtype)
        return gradients.query.to(query.dtype), key, value, None, None, None, None


def shift(
    tensors: Sequence[torch.Tensor], dim: int, length: int, collective: Collective
) -> list[torch.Tensor]:
    """Sends tensors to the next rank, and returns the previous rank's, in one message.

    Args:
        dim: Dimension whose length differs between ranks.
        length: Its length in the tensors that arrive.
    """
    shapes = [(*x.shape[:dim], length, *x.shape[dim + 1 :]) for x in tensors]
    sizes = [torch.Size(s).numel() * x.element_size() for s, x in zip(shapes, tensors, strict=True)]
    # As bytes, because dtypes may differ. All have equally many elements, so wide dtypes stay aligned.
    sent = torch.cat([x.contiguous().view(-1).view(torch.uint8) for x in tensors])
    rank, size = collective.rank, collective.size
    pieces, counts = [sent[:0]] * size, [0] * size
    pieces[(rank + 1) % size], counts[(rank - 1) % size] = sent, sum(sizes)
    came = collective.all_to_all(pieces, counts)[(rank - 1) % size]
    return [
        part.view(x.dtype).view(shape)
        for part, x, shape in zip(torch.split(came, sizes), tensors, shapes, strict=True)
    ]
