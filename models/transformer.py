"""Transformers: an encoder that classifies sequences of token ids, and a causal decoder, a language model.

Vaswani et al. 2017, "Attention Is All You Need", with normalisation before each sublayer (Xiong et al.
2020) and learned positions. The blocks are the items of one `nn.ModuleList`, `blocks`, so that
activation checkpointing has a chain to cut into segments. In some of them a mixture of experts may take the
place of the perceptron.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ringspark.models.chain import Link
from ringspark.models.experts.layer import MixtureOfExperts
from ringspark.models.experts.options import mixture_options
from ringspark.models.mlp import check_dropout
from ringspark.models.whole_rows import WholeRows, attend, read

INIT_STD = 0.02
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float, bool], torch.Tensor]


class Attention(nn.Module):
    """Self-attention of several heads: (batch, seq, dim) -> (batch, seq, dim).

    Attributes:
        head_dim: Width of a head. `qkv` and `out` may hold fewer heads than the whole network has.
        attend: How queries, keys and values are mixed; see `whole_rows.attend`, which it is at first.
    """

    attend: Attend = staticmethod(attend)

    def __init__(self, dim: int, num_heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.dropout, self.causal = dropout, causal
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Attends where `mask`, (batch, 1, 1, seq) booleans, is True; everywhere if it is None."""
        # Not a view: a size of -1 is unknown to it where there are no rows or tokens.
        heads = self.qkv(x).unflatten(-1, (3, -1, self.head_dim))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (batch, heads, seq, head_dim)
        mixed = self.attend(query, key, value, mask, self.dropout if self.training else 0.0, self.causal)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
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
            tokens: (batch, seq) booleans, False for padding; None takes what `mask` says. As a mask, they are
                those of whole rows, and where they have no rows, they only tell how long one is.
        """
        if tokens is None and mask is not None:
            tokens = mask[:, 0, 0]
        x = x + self.dropout(self.attention(self.attention_norm(x), mask))
        out: torch.Tensor = x + self.dropout(self.mixture(self.mlp_norm(x), tokens))
        return out


class _Trunk(nn.Module):
    """The part that both networks share below their heads: embeddings, blocks, the last normalisation.

    Attributes:
        rows: Which tokens of a row are here; see `WholeRows`.
    """

    rows = WholeRows()

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

    def tensor_plan(self, num_ranks: int) -> dict[str, Any]:
        """Returns how tensor parallelism cuts the layers: whole heads, pairs of layers, ids.

        Raises:
            ValueError: So many ranks have no whole heads each.
        """
        heads = next(layer.num_heads for layer in self.modules() if isinstance(layer, Attention))
        if heads % num_ranks:
            raise ValueError(
                f"parallelism's 'tensor' must divide num_heads ({heads}), got {num_ranks}; set num_heads to "
                "a multiple of it, or give 'tensor' fewer workers"
            )
        plan: dict[str, Any] = {
            "tokens": "vocabulary",
            "blocks.*.attention.qkv": ["column", 3],
            "blocks.*.attention.out": "row",
        }
        if any(isinstance(block, TransformerBlock) for block in self.blocks):
            plan |= {"blocks.*.up": "column", "blocks.*.down": "row"}
        return plan

    def _init_weights(self) -> None:
        # Embeddings start small, as in GPT-2: torch's variance of 1 would drown what the blocks add.
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=INIT_STD)

    def _features(self, ids: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Maps (batch, seq) ids to (batch, own seq, dim); attends where `tokens`, (batch, seq), is True."""
        x = self._embedded(ids)
        mask = self.rows.mask(_attention_mask(tokens), ids.shape[1])
        for block in self.blocks:
            x = block(x, mask, tokens) if isinstance(block, MixtureBlock) else block(x, mask)
        out: torch.Tensor = self.norm(x)
        return out

    def _block_links(self) -> list[Link]:
        return [
            Link(f"blocks.{key}", _MaskedBlock(block), (f"blocks.{key}",))
            for key, block in self.blocks.named_children()
        ]

    def _embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """Maps (batch, seq) ids to (batch, own seq, dim)."""
        seq = ids.shape[1]
        if seq > self.max_seq_len:
            raise ValueError(f"sequences must have at most max_seq_len={self.max_seq_len} tokens, got {seq}")
        positions = self.rows.own(torch.arange(seq, device=ids.device), 0)
        x = self.rows.embedded(self.tokens, ids.long()) + self.positions(positions)
        out: torch.Tensor = self.dropout(x)
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
        tokens = self._real_tokens(ids, mask)
        return self._pooled_head(self._features(ids, tokens), tokens, ids.shape[1])

    def links(self) -> list[Link]:
        """Returns the embeddings, the blocks and the head; real tokens travel beside the hidden states."""
        embed = Link("tokens", self._embedded_with_mask, ("tokens", "positions", "dropout"))
        return [embed, *self._block_links(), Link("head", self._normed_head, ("norm", "head"))]

    def _real_tokens(self, ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Returns (batch, seq) booleans, False where a row is filled up; None if no row is."""
        if mask is not None:
            return mask.bool()
        return None if self.padding_id is None else ids != self.padding_id

    def _embedded_with_mask(
        self, ids: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._embedded(ids), self.rows.told(self._real_tokens(ids, mask), ids.shape[1])

    def _normed_head(self, x: torch.Tensor, told: torch.Tensor | None) -> torch.Tensor:
        return self._pooled_head(self.norm(x), *read(told, x))

    def _pooled_head(self, x: torch.Tensor, tokens: torch.Tensor | None, seq: int) -> torch.Tensor:
        return self.rows.alike(self.head(self.rows.pool(x, tokens, seq)))


def scores(x: torch.Tensor, tokens: nn.Embedding) -> torch.Tensor:
    """Compares (batch, seq, dim) with every token's embedding: (batch, seq, vocab_size)."""
    return F.linear(x, tokens.weight)


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

    # How tokens are compared; a table that is cut by its ids has a way of its own.
    scores: Callable[[torch.Tensor, Any], torch.Tensor] = staticmethod(scores)

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
        return self._tied_head(self._features(ids), ids.shape[1])

    def links(self) -> list[Link]:
        """Returns the embeddings, the blocks and the head, which uses the embedding's weights."""
        embed = Link("tokens", self._embedded_with_length, ("tokens", "positions", "dropout"))
        return [embed, *self._block_links(), Link("head", self._normed_head, ("norm", "tokens"))]

    def _embedded_with_length(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._embedded(ids), self.rows.told(None, ids.shape[1])

    def _normed_head(self, x: torch.Tensor, told: torch.Tensor | None) -> torch.Tensor:
        return self._tied_head(self.norm(x), read(told, x)[1])

    def _tied_head(self, x: torch.Tensor, seq: int) -> torch.Tensor:
        logits = self.rows.joined(self.scores(x, self.tokens), 1, seq)  # (batch, seq, vocab_size)
        # Not a view: fully sharded training puts a hook on the output, which a change of a view would lose.
        return logits.transpose(1, 2).contiguous()


class _MaskedBlock:
    """A block that takes and gives beside the hidden states what `WholeRows.told` says of the rows."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block

    def __call__(
        self, x: torch.Tensor, told: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        mask = _attention_mask(told)
        # A mixture has to know rows that are all padding, which attend to themselves.
        more = (told,) if isinstance(self.block, MixtureBlock) else ()
        return self.block(x, mask, *more), told


def _attention_mask(tokens: torch.Tensor | None) -> torch.Tensor | None:
    """Returns where to attend, (batch, 1, 1, seq) booleans, for real tokens, (batch, seq)."""
    if tokens is None:
        return None
    mask = tokens[:, None, None, :]
    # A row that is all padding attends to itself: attention to nothing would be NaN.
    return mask | ~mask.any(-1, keepdim=True)


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
