"""Transformers: an encoder that classifies sequences of token ids, and a causal language model.

Vaswani et al. 2017, "Attention Is All You Need", with normalization before each sublayer (Xiong et al. 2020)
and learned positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ringspark.models.chain import Link
from ringspark.models.checks import check_dropout, check_sizes
from ringspark.models.whole_rows import WholeRows, attend, read

INIT_STD = 0.02
# Makes blocks with mixtures of experts, for the argument `experts`.
_MIXTURES = "ringspark.extras.experts.block"
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float, bool], torch.Tensor]


class Attention(nn.Module):
    """Multi-head self-attention: (batch, seq, dim) -> (batch, seq, dim).

    Attributes:
        head_dim: Width of a head. With tensor parallelism `qkv` and `out` hold only this rank's heads.
        attend: Attention function; context parallelism replaces it.
    """

    attend: Attend = staticmethod(attend)

    def __init__(self, dim: int, num_heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.dropout, self.causal = dropout, causal
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Attends to the keys for which `mask` is True; to all keys if `mask` is None.

        `mask` is (batch, 1, 1, seq) booleans.
        """
        # Not `view`, which cannot infer -1 without rows or tokens.
        heads = self.qkv(x).unflatten(-1, (3, -1, self.head_dim))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (batch, heads, seq, head_dim)
        mixed = self.attend(query, key, value, mask, self.dropout if self.training else 0.0, self.causal)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class AttentionBlock(nn.Module):
    """Base class of transformer blocks: has the attention sublayer; a subclass adds the second sublayer.

    Attributes:
        takes_tokens: Whether `forward` also takes which tokens are no padding.
    """

    takes_tokens = False

    def __init__(
        self, dim: int, num_heads: int, dropout: float, attention_dropout: float, causal: bool
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, num_heads, attention_dropout, causal)
        self.mlp_norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def _add_attention(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        out: torch.Tensor = x + self.dropout(self.attention(self.attention_norm(x), mask))
        return out


class TransformerBlock(AttentionBlock):
    def __init__(
        self, dim: int, num_heads: int, mlp_dim: int, dropout: float, attention_dropout: float, causal: bool
    ) -> None:
        super().__init__(dim, num_heads, dropout, attention_dropout, causal)
        self.up, self.activation, self.down = nn.Linear(dim, mlp_dim), nn.GELU(), nn.Linear(mlp_dim, dim)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self._add_attention(x, mask)
        out: torch.Tensor = x + self.dropout(self.down(self.activation(self.up(self.mlp_norm(x)))))
        return out


class _Trunk(nn.Module):
    rows = WholeRows()
    causal: bool

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
        experts: Mapping[str, Any] | None,
    ) -> None:
        super().__init__()
        mlp_dim = 4 * dim if mlp_dim is None else mlp_dim
        check_sizes(vocab_size=vocab_size, max_seq_len=max_seq_len, dim=dim, num_heads=num_heads)
        check_sizes(depth=depth, mlp_dim=mlp_dim)
        if dim % num_heads:
            raise ValueError(f"dim must be a multiple of num_heads ({num_heads}), got {dim}")
        check_dropout("dropout", dropout)
        check_dropout("attention_dropout", attention_dropout)
        self.max_seq_len = max_seq_len
        self.tokens = nn.Embedding(vocab_size, dim)
        self.positions = nn.Embedding(max_seq_len, dim)
        self.dropout = nn.Dropout(dropout)
        block = (dim, num_heads, mlp_dim, dropout, attention_dropout, self.causal)
        if experts is None:
            self.blocks = nn.ModuleList(TransformerBlock(*block) for _ in range(depth))
        else:
            self.blocks = import_module(_MIXTURES).make_blocks(block, depth, experts)
        self.norm = nn.LayerNorm(dim)

    def tensor_plan(self, num_ranks: int) -> dict[str, Any]:
        """Returns how tensor parallelism shards the layers.

        Attention is sharded by heads, the linear layers in pairs, and the embedding by token ids.
        """
        heads = next(layer.num_heads for layer in self.modules() if isinstance(layer, Attention))
        if heads % num_ranks:
            raise ValueError(
                f"parallelism's 'tensor' must divide num_heads ({heads}), got {num_ranks}; set num_heads to "
                "a multiple of 'tensor', or give 'tensor' fewer workers"
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
        # Embeddings start small, as in GPT-2: torch's variance of 1 would drown the blocks' outputs.
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=INIT_STD)

    def _features(self, ids: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Maps (batch, seq) ids to (batch, tokens on this rank, dim).

        `tokens` is (batch, seq) booleans, False for tokens that attention ignores.
        """
        x = self._embed(ids)
        mask = self.rows.mask(_attention_mask(tokens), ids.shape[1])
        for block in self.blocks:
            x = block(x, mask, tokens) if block.takes_tokens else block(x, mask)
        out: torch.Tensor = self.norm(x)
        return out

    def _links(self, embed: Callable[..., Any], last: str) -> list[Link]:
        return [
            Link("tokens", embed, ("tokens", "positions", "dropout")),
            *(
                Link(f"blocks.{key}", _MaskedBlock(block), (f"blocks.{key}",))
                for key, block in self.blocks.named_children()
            ),
            Link("head", self._normed_head, ("norm", last)),
        ]

    def _normed_head(self, x: torch.Tensor, told: torch.Tensor | None) -> torch.Tensor:
        raise NotImplementedError

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
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
        vocab_size: Number of token ids; ids run from 0 to `vocab_size - 1`.
        max_seq_len: Largest number of tokens per row.
        dim: Width of the embeddings and of each block's input and output.
        depth: Number of blocks.
        num_heads: Number of attention heads; it must divide `dim`.
        out_features: Outputs per row.
        mlp_dim: Width of the hidden layer of each block's perceptron; None means 4 * dim.
        dropout: Dropout probability on embeddings and on the output of each sublayer.
        attention_dropout: Dropout probability on attention weights.
        padding_id: Token id of padding, which attention and the mean ignore. Not used if `forward` gets a
            mask.
        experts: Options of `MixtureOfExperts`, such as {"num_experts": 8}. The mixture replaces the
            perceptron in every second block; {"every": n} changes this to every n-th block. None means no
            mixtures.

    Raises:
        ValueError: If an argument is out of range, or in `forward` a row is too long.
    """

    causal = False

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
            vocab_size, max_seq_len, dim, depth, num_heads, mlp_dim, dropout, attention_dropout, experts
        )
        if padding_id is not None and not 0 <= padding_id < vocab_size:
            raise ValueError(f"padding_id must lie in 0..{vocab_size - 1}, got {padding_id}")
        check_sizes(out_features=out_features)
        self.padding_id = padding_id
        self.head = nn.Linear(dim, out_features)
        self._init_weights()

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Maps (batch, seq) token ids to (batch, out_features).

        `mask` is (batch, seq), 0 for padding. If it is None, `padding_id` marks the padding.
        """
        tokens = self._real_tokens(ids, mask)
        return self._pooled_head(self._features(ids, tokens), tokens, ids.shape[1])

    def links(self) -> list[Link]:
        return self._links(self._embed_with_mask, "head")

    def _real_tokens(self, ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Returns (batch, seq) booleans, False for padding; None without a mask and without `padding_id`."""
        if mask is not None:
            return mask.bool()
        return None if self.padding_id is None else ids != self.padding_id

    def _embed_with_mask(
        self, ids: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._embed(ids), self.rows.told(self._real_tokens(ids, mask), ids.shape[1])

    def _normed_head(self, x: torch.Tensor, told: torch.Tensor | None) -> torch.Tensor:
        return self._pooled_head(self.norm(x), *read(told, x))

    def _pooled_head(self, x: torch.Tensor, tokens: torch.Tensor | None, seq: int) -> torch.Tensor:
        return self.rows.alike(self.head(self.rows.pool(x, tokens, seq)))


def scores(x: torch.Tensor, tokens: nn.Embedding) -> torch.Tensor:
    return F.linear(x, tokens.weight)


class TransformerLM(_Trunk):
    """A causal decoder that returns logits of the next token at every position.

    The head shares the embedding's weights. The label column must be the ids shifted by one position, with
    -100 at positions without a next token. The outputs are (batch, vocab_size, seq), the order that torch's
    cross entropy expects.

    Args:
        vocab_size, max_seq_len, dim, depth, num_heads, mlp_dim, dropout, attention_dropout, experts: See
            `TransformerClassifier`.

    Raises:
        ValueError: If an argument is out of range, or in `forward` a row is too long.
    """

    causal = True
    # Tensor parallelism replaces it where the embedding is sharded by ids.
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
            vocab_size, max_seq_len, dim, depth, num_heads, mlp_dim, dropout, attention_dropout, experts
        )
        self._init_weights()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Maps (batch, seq) token ids to (batch, vocab_size, seq)."""
        return self._tied_head(self._features(ids), ids.shape[1])

    def links(self) -> list[Link]:
        return self._links(self._embed_with_length, "tokens")

    def _embed_with_length(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._embed(ids), self.rows.told(None, ids.shape[1])

    def _normed_head(self, x: torch.Tensor, told: torch.Tensor | None) -> torch.Tensor:
        return self._tied_head(self.norm(x), read(told, x)[1])

    def _tied_head(self, x: torch.Tensor, seq: int) -> torch.Tensor:
        logits = self.rows.joined(self.scores(x, self.tokens), 1, seq)  # (batch, seq, vocab_size)
        # Not a view: fully sharded training puts a hook on the output, and changing a view loses its hook.
        return logits.transpose(1, 2).contiguous()


class _MaskedBlock:
    def __init__(self, block: nn.Module) -> None:
        self.block = block

    def __call__(
        self, x: torch.Tensor, told: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        mask = _attention_mask(told)
        # The mask does not mark all padding: it lets rows of padding alone attend to themselves.
        more = (told,) if self.block.takes_tokens else ()
        return self.block(x, mask, *more), told


def _attention_mask(tokens: torch.Tensor | None) -> torch.Tensor | None:
    """Turns (batch, seq) booleans, True for real tokens, into an attention mask (batch, 1, 1, seq)."""
    if tokens is None:
        return None
    mask = tokens[:, None, None, :]
    # A row of padding alone attends to itself: attention to nothing would be NaN.
    return mask | ~mask.any(-1, keepdim=True)
