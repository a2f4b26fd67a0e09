"""Transformer blocks with a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ringspark.extras.experts.layer import MixtureOfExperts, mixture_options
from ringspark.models.transformer import AttentionBlock, TransformerBlock


class MixtureBlock(AttentionBlock):
    """A transformer block with a mixture of experts in place of the perceptron."""

    takes_tokens = True

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_dim: int,
        dropout: float,
        attention_dropout: float,
        causal: bool,
        experts: Mapping[str, Any],
    ) -> None:
        super().__init__(dim, num_heads, dropout, attention_dropout, causal)
        self.mixture = MixtureOfExperts(dim, **{"mlp_dim": mlp_dim, **experts}, causal=causal)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Maps (batch, seq, dim) to (batch, seq, dim).

        Args:
            mask: See `Attention`.
            tokens: (batch, tokens of a whole row) booleans, False for padding; or the result of
                `WholeRows.told`. If `tokens` is None, `mask` marks the padding.
        """
        if tokens is None and mask is not None:
            tokens = mask[:, 0, 0]
        x = self._add_attention(x, mask)
        out: torch.Tensor = x + self.dropout(self.mixture(self.mlp_norm(x), tokens))
        return out


def make_blocks(arguments: tuple[Any, ...], depth: int, experts: Mapping[str, Any]) -> nn.ModuleList:
    """Returns the blocks of a transformer; `arguments` are those of `TransformerBlock`."""
    every, options = mixture_options(experts, depth)
    return nn.ModuleList(
        TransformerBlock(*arguments) if number % every else MixtureBlock(*(*arguments, options))
        for number in range(1, depth + 1)
    )
