"""Attention with whole rows of some heads on each rank.

Jacobs et al. 2023, "DeepSpeed Ulysses". An all-to-all exchanges all heads of a rank's tokens for all tokens
of some heads, and another all-to-all reverses it. A rank without heads is idle.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from ringspark.estimators.parallel.shard_spec import shard_length
from ringspark.extras.model_parallel.communication import all_to_all
from ringspark.extras.model_parallel.sequence.context import Context
from ringspark.models.whole_rows import attend


class Ulysses(Context):
    takes_dropout: ClassVar[bool] = True
    balances: ClassVar[bool] = False

    def attend(
        self,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        seq: int,
        dropout: float,
        causal: bool,
    ) -> torch.Tensor:
        num_heads, tokens = inputs[0].shape[1:3]
        size, rank = self.collective.size, self.collective.rank
        heads = [shard_length(num_heads, r, size) for r in range(size)]
        lengths, own = self.spans.lengths(seq), heads[rank]
        sent, arriving = [n * tokens for n in heads], [n * own for n in lengths]
        # One row per token and head, because ranks differ in their numbers of heads and tokens.
        rows = torch.stack(inputs).permute(2, 3, 0, 1, 4)  # (heads, tokens, 3, batch, head_dim)
        came = all_to_all(rows.flatten(0, 1), sent, arriving, self.collective)
        parts = zip(torch.split(came, arriving), lengths, strict=True)
        pieces = [part.view(own, length, *came.shape[1:]) for part, length in parts]
        whole = torch.cat(pieces, 1).permute(2, 3, 0, 1, 4)  # (3, batch, own heads, seq, head_dim)
        mixed = attend(whole[0], whole[1], whole[2], mask, dropout, causal) if whole.numel() else whole[0]
        rows = mixed.permute(2, 1, 0, 3)  # (seq, own heads, batch, head_dim)
        came = all_to_all(rows.flatten(0, 1), arriving, sent, self.collective)
        parts = zip(torch.split(came, sent), heads, strict=True)
        pieces = [part.view(tokens, number, *came.shape[1:]) for part, number in parts]
        return torch.cat(pieces, 1).permute(2, 1, 0, 3)  # (batch, heads, own tokens, head_dim)
