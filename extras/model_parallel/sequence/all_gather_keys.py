"""Attention to keys and values gathered from all ranks: the fewest messages.

Each attention needs an all-gather in the forward pass and a reduce-scatter in the backward pass. It keeps the
rank's queries, and keys and values of whole rows, for the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringspark.extras.model_parallel.sequence.context import SpanContext
from ringspark.extras.model_parallel.sequence.span_attention import SpanAttention, SpanGradients


class AllGatherKeys(SpanContext):
    def add_keys(
        self, attention: SpanAttention, key: torch.Tensor, value: torch.Tensor, seq: int
    ) -> Sequence[torch.Tensor]:
        whole = self.spans.gather(torch.stack([key, value]), 3, seq, self.collective)
        attention.add(whole[0], whole[1], [(0, seq)])
        return [whole]

    def add_gradients(
        self, gradients: SpanGradients, saved: Sequence[torch.Tensor], seq: int
    ) -> torch.Tensor:
        (whole,) = saved
        found = torch.zeros_like(whole, dtype=gradients.query.dtype)
        gradients.add(whole[0], whole[1], [(0, seq)], found)
        parts = [self.spans.take(found, 3, rank) for rank in range(self.collective.size)]
        flat = torch.cat([part.reshape(-1) for part in parts])
        own = self.collective.start_reduce_scatter(flat, [part.numel() for part in parts])()
        return own.view(parts[self.collective.rank].shape)
