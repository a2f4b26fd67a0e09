"""Whole rows of some heads on every rank for the time of an attention.

Jacobs et al. 2023, "DeepSpeed Ulysses". An all-to-all turns all heads of a rank's tokens into all tokens of
some heads, and another one turns the result back; the backward pass does the same. Each exchange moves what
one rank has, whatever their number, and attention is torch's own, dropout included. There must be heads for
all ranks: one that gets none idles.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from ringspark.estimators.parallel.cut import length_of_part
from ringspark.estimators.parallel.model.communication import exchanged
from ringspark.estimators.parallel.model.sequence.context import Context
from ringspark.models.whole_rows import attend


class ExchangedHeads(Context):
    """Exchanges tokens for heads."""

    takes_dropout: ClassVar[bool] = True
    balances: ClassVar[bool] = False

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
        num_heads, tokens = query.shape[1:3]
        size, rank = self.collective.size, self.collective.rank
        heads = [length_of_part(num_heads, r, size) for r in range(size)]
        lengths, own = self.spans.lengths(seq), heads[rank]
        sent, arriving = [n * tokens for n in heads], [n * own for n in lengths]
        # One row for each token of each head, as ranks have neither as many heads nor as many tokens.
        rows = torch.stack([query, key, value]).permute(2, 3, 0, 1, 4)  # (heads, tokens, 3, batch, head_dim)
        came = exchanged(rows.flatten(0, 1), sent, arriving, self.collective)
        parts = zip(torch.split(came, arriving), lengths, strict=True)
        pieces = [part.view(own, length, *came.shape[1:]) for part, length in parts]
        whole = torch.cat(pieces, 1).permute(2, 3, 0, 1, 4)  # (3, batch, own heads, seq, head_dim)
        mixed = attend(whole[0], whole[1], whole[2], mask, dropout, causal) if whole.numel() else whole[0]
        rows = mixed.permute(2, 1, 0, 3)  # (seq, own heads, batch, head_dim)
        came = exchanged(rows.flatten(0, 1), arriving, sent, self.collective)
        parts = zip(torch.split(came, sent), heads, strict=True)
        pieces = [part.view(tokens, number, *came.shape[1:]) for part, number in parts]
        return torch.cat(pieces, 1).permute(2, 1, 0, 3)  # (batch, heads, own tokens, head_dim)
