"""Transformers: an encoder that classifies sequences of token ids, and a causal decoder, a language model.

Vaswani et al. 2017, "Attention Is All You Need", with normalisation before each sublayer (Xiong et al.
2020) and learned positions. The blocks are the items of one `nn.ModuleList`, `blocks`, so that
activation checkpointing has a chain to cut into segments. In some of them a mixture of experts may take the
place of the perceptron.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ringspark.models.experts.layer import MixtureOfExperts
from ringspark.models.experts.options import mixture_options
from ringspark.models.mlp import check_dropout

INIT_STD = 0.02


class Attention(nn.Module):
    """Self-attention of several heads: (batch, seq, dim) -> (batch, seq, dim)."""

    def __init__(self, dim: int, num_heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.num_heads, self.dropout, self.causal = num_heads, dropout, causal
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Attends where `mask`, (batch, 1, 1, seq) booleans, is True; everywhere if it is None."""
        batch, seq, dim = x.shape
        heads = self.qkv(x).view(batch, seq, 3, self.num_heads, dim // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (batch, heads, seq, dim / heads)
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal,
        )
        out: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq, dim))
        return out


class TransformerBlock(nn.Module):
    """Attention and a two-layer perceptron; each normalises its input and adds its output to it."""

    def __init__(
        self, dim: int, num_heads: int, mlp_dim: int, dropout: float, attention_dropout: float, causal: bool
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, num_heads, attention_dropout, causal)
        self.mlp_norm = nn.LayerNorm(dim)
        self.up, self.activation, self.down = nn.Linear(dim, mlp_dim), nn.GELU(), nn.Linear(mlp_dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Runs the block on (batch, seq, dim); `mask` as in `Attention`."""
        x = x + self.dropout(self.attention(self.attention_norm(x), mask))
        out: torch.Tensor = x + self.dropout(self.down(self.activation(self.up(self.mlp_norm(x)))))
        return out


class MixtureBlock(nn.Module):
    """A transformer block that has a mixture of experts for its perceptron; see `MixtureOfExperts`."""

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
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, num_heads, attention_dropout, causal)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mixture = MixtureOfExperts(dim, **{"mlp_dim": mlp_dim, **experts}, causal=causal)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Runs the block on (batch, seq, dim).

        Args:
            mask: See `Attention`.
            tokens: (batch, seq) booleans, False for padding; None takes what `mask` says.
        """
        if tokens is None and mask is not None:
            tokens = mask[:, 0, 0]
        x = x + self.dropout(self.attention(self.attention_norm(x), mask))
        out: torch.Tensor = x + self.dropout(self.mixture(self.mlp_norm(x), tokens))
        return out


class _Trunk(nn.Module):
    """The part that both networks share below their heads: embeddings, blocks, the last normalisation."""

    def __init__(
        self,
        vocab_size: int,
        max_seq_len: int,
        dim: int,
        depth: int,
        num_heads: int,
        mlp_dim: int | None,
        dropout: float,
        attention_dropout: float,
        causal: bool,
        padding_id: int | None = None,
        experts: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        sizes = {"vocab_size": vocab_size, "max_seq_len": max_seq_len, "dim": dim, "num_heads": num_heads}
        _check_sizes(**sizes, depth=depth, mlp_dim=4 * dim if mlp_dim is None else mlp_dim)
        if dim % num_heads:
            raise ValueError(f"dim must be a multiple of num_heads ({num_heads}), got {dim}")
        check_dropout("dropout", dropout)
        check_dropout("attention_dropout", attention_dropout)
        if padding_id is not None and not 0 <= padding_id < vocab_size:
            raise ValueError(f"padding_id must lie in 0..{vocab_size - 1}, got {padding_id}")
        self.max_seq_len, self.padding_id = max_seq_len, padding_id
        self.tokens = nn.Embedding(vocab_size, dim)
        self.positions = nn.Embedding(max_seq_len, dim)
        self.dropout = nn.Dropout(dropout)
        block = (dim, num_heads, mlp_dim or 4 * dim, dropout, attention_dropout, causal)
        every, options = (depth + 1, {}) if experts is None else mixture_options(experts, depth)
        self.blocks = nn.ModuleList(
            TransformerBlock(*block) if number % every else MixtureBlock(*block, options)
            for number in range(1, depth + 1)
        )
        self.norm = nn.LayerNorm(dim)

    def _init_weights(self) -> None:
        # Embeddings start small, as in GPT-2: torch's variance of 1 would drown what the blocks add.
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=INIT_STD)

    def _features(self, ids: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Maps (batch, seq) to (batch, seq, dim); attends where `tokens`, (batch, seq) booleans, is True."""
        seq = ids.shape[1]
        if seq > self.max_seq_len:
            raise ValueError(f"sequences must have at most max_seq_len={self.max_seq_len} tokens, got {seq}")
        ids = ids.long()
        mask = None
        if tokens is not None:
            mask = tokens[:, None, None, :]
            # A row that is all padding attends to itself: attention to nothing would be NaN.
            mask = mask | ~mask.any(-1, keepdim=True)
        x = self.dropout(self.tokens(ids) + self.positions(torch.arange(seq, device=ids.device)))
        for block in self.blocks:
            x = block(x, mask, tokens) if isinstance(block, MixtureBlock) else block(x, mask)
        out: torch.Tensor = self.norm(x)
        return out


class TransformerClassifier(_Trunk):
    """An encoder and a linear head on the mean over the tokens; the outputs are logits.

    Args:
        vocab_size: Number of token ids, which run from 0 to `vocab_size - 1`.
        max_seq_len: Most tokens per row.
        dim: Width between the blocks.
        depth: Number of blocks.
        num_heads: Number of attention heads; it must divide `dim`.
        out_features: Outputs per row.
        mlp_dim: Width inside the blocks; None takes 4 * dim.
        dropout: Dropout probability on embeddings and on the output of each sublayer.
        attention_dropout: Dropout probability on attention weights.
        padding_id: Token id that fills rows up; attention and the mean leave such tokens out. A mask given
            to `forward` says the same without it.
        experts: Options of `MixtureOfExperts`, such as {"num_experts": 8}, which then takes the place of the
            perceptron in every second block; "every" gives another distance. None: perceptrons alone.

    Raises:
        ValueError: If an argument is out of range, or in `forward` a row is too long.
    """

    def __init__(
        self,
        vocab_size: int,
        max_seq_len: int,
        dim: int,
        depth: int,
        num_heads: int,
        out_features: int,
        mlp_dim: int | None = None,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        padding_id: int | None = None,
        experts: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            vocab_size,
            max_seq_len,
            dim,
            depth,
            num_heads,
            mlp_dim,
            dropout,
            attention_dropout,
            causal=False,
            padding_id=padding_id,
            experts=experts,
        )
        _check_sizes(out_features=out_features)
        self.head = nn.Linear(dim, out_features)
        self._init_weights()

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Maps (batch, seq) token ids to (batch, out_features).

        Args:
            ids: (batch, seq) token ids.
            mask: (batch, seq), 0 where a row is filled up; None takes `padding_id`.
        """
        tokens = mask.bool() if mask is not None else None
        if tokens is None and self.padding_id is not None:
            tokens = ids != self.padding_id
        x = self._features(ids, tokens)
        if tokens is None:
            pooled = x.mean(1)
        else:
            real = tokens.unsqueeze(-1).to(x.dtype)  # (batch, seq, 1)
            pooled = (x * real).sum(1) / real.sum(1).clamp(min=1)
        out: torch.Tensor = self.head(pooled)
        return out


class TransformerLM(_Trunk):
    """A causal decoder: logits of the next token at every position. The head shares the embedding's weights.

    The label column is the ids moved up by one, -100 where there is no next token. The outputs are
    (batch, vocab_size, seq), as torch's cross entropy wants classes, not (batch, seq, vocab_size).

    Args:
        vocab_size, max_seq_len, dim, depth, num_heads, mlp_dim, dropout, attention_dropout, experts: See
            `TransformerClassifier`.

    Raises:
        ValueError: If an argument is out of range, or in `forward` a row is too long.
    """

    def __init__(
        self,
        vocab_size: int,
        max_seq_len: int,
        dim: int,
        depth: int,
        num_heads: int,
        mlp_dim: int | None = None,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        experts: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            vocab_size,
            max_seq_len,
            dim,
            depth,
            num_heads,
            mlp_dim,
            dropout,
            attention_dropout,
            causal=True,
            experts=experts,
        )
        self._init_weights()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Maps (batch, seq) token ids to (batch, vocab_size, seq)."""
        logits = F.linear(self._features(ids), self.tokens.weight)  # (batch, seq, vocab_size)
        # Not a view: fully sharded training puts a hook on the output, which a change of a view would lose.
        return logits.transpose(1, 2).contiguous()


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
