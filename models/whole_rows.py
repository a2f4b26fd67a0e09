"""The interface between a network over tokens and context parallelism.

Context parallelism replaces a network's attribute `rows` and the attribute `attend` of its modules.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class WholeRows:
    """Rows whose tokens are all on this rank. The methods document sequence-sharded rows too.

    Between `pool` and `alike` all ranks of a row compute the same values, so they must draw the same random
    numbers. `tokens` are (batch, seq) booleans, False for padding; None without padding. `seq` counts all
    tokens.
    """

    is_spread = False

    def own(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns this rank's shard of `x` along `dim`, without a gradient; `x` holds all tokens."""
        return x

    def embedded(self, table: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        """Embeds this rank's tokens: (batch, own tokens, dim). The first call of a forward pass."""
        found: torch.Tensor = table(self.own(ids, 1))
        return found

    def mask(self, mask: torch.Tensor | None, seq: int) -> torch.Tensor | None:
        """Returns the mask for `attend`, over all tokens; sequence-sharded rows always have one.

        `mask` is (batch, 1, 1, seq) booleans, False for tokens to ignore.
        """
        return mask

    def told(self, tokens: torch.Tensor | None, seq: int) -> torch.Tensor | None:
        """Returns a tensor from which later links, which see no ids, `read` real tokens and the length."""
        return tokens

    def pool(self, x: torch.Tensor, tokens: torch.Tensor | None, seq: int) -> torch.Tensor:
        """Returns the mean of `x`, (batch, own tokens, dim), over all tokens: (batch, dim)."""
        if tokens is None:
            return x.mean(1)
        real = tokens.unsqueeze(-1).to(x.dtype)  # (batch, seq, 1)
        return (x * real).sum(1) / real.sum(1).clamp(min=1)

    def alike(self, outputs: torch.Tensor) -> torch.Tensor:
        """Marks outputs that every rank of a row computed from `pool`, so that their gradients count once."""
        return outputs

    def joined(self, x: torch.Tensor, dim: int, seq: int) -> torch.Tensor:
        """All-gathers dimension `dim`, which has this rank's tokens, to all `seq` tokens in order."""
        return x


def read(known: torch.Tensor | None, x: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    """Returns the real tokens, (batch, seq) booleans or None without padding, and the number of all tokens.

    `known` is a result of `WholeRows.told`; its shape (0, seq) gives only the length. `x` is (batch, own
    tokens, ...).
    """
    if known is None:
        return None, x.shape[1]
    return (known.to(x.device) if known.shape[0] == x.shape[0] else None), known.shape[1]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
) -> torch.Tensor:
    """Computes scaled dot-product attention of (batch, heads, seq, head_dim) tensors.

    `mask` is (batch, 1, 1, seq) booleans, False for keys to ignore. `causal` ignores later keys.
    """
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal
    )
