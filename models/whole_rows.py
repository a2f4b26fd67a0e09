"""The interface between a network over tokens and context parallelism.

To shard rows over ranks, context parallelism replaces a network's attribute `rows` and the attribute `attend`
of its modules.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class WholeRows:
    """Rows that have all their tokens on this rank. Context parallelism overrides the methods.

    The methods' docstrings also describe sequence-sharded rows, in which a rank has only some of a row's
    tokens. Between the calls of `pool` and `alike`, all ranks of a row compute the same values, so they must
    draw the same random numbers.

    The argument `tokens` is (batch, seq) booleans, False for padding; None if there is no padding. `seq` is
    the number of all tokens of a row.
    """

    is_spread = False

    def own(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns this rank's shard of `x` along `dim`, without a gradient; `x` holds all tokens."""
        return x

    def embedded(self, table: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        """Embeds this rank's tokens: (batch, own tokens, dim). A forward pass must call this method first."""
        found: torch.Tensor = table(self.own(ids, 1))
        return found

    def mask(self, mask: torch.Tensor | None, seq: int) -> torch.Tensor | None:
        """Returns the mask for `attend`, over all tokens. With sequence-sharded rows it is never None.

        `mask` is (batch, 1, 1, seq) booleans, False for tokens to ignore.
        """
        return mask

    def told(self, tokens: torch.Tensor | None, seq: int) -> torch.Tensor | None:
        """Packs `tokens` and `seq` into a tensor for later pipeline stages, which get no ids; see `read`."""
        return tokens

    def pool(self, x: torch.Tensor, tokens: torch.Tensor | None, seq: int) -> torch.Tensor:
        """Returns the mean of `x` over all tokens: (batch, own tokens, dim) -> (batch, dim)."""
        if tokens is None:
            return x.mean(1)
        real = tokens.unsqueeze(-1).to(x.dtype)  # (batch, seq, 1)
        return (x * real).sum(1) / real.sum(1).clamp(min=1)

    def alike(self, outputs: torch.Tensor) -> torch.Tensor:
        """Marks outputs that every rank of a row computes alike, so that their gradients count only once.

        Such outputs are computed from the result of `pool`.
        """
        return outputs

    def joined(self, x: torch.Tensor, dim: int, seq: int) -> torch.Tensor:
        """All-gathers this rank's tokens along `dim`; returns all `seq` tokens in order."""
        return x

    def whole(self, x: torch.Tensor, dim: int, seq: int) -> torch.Tensor:
        """All-gathers the tokens, like `joined`, if all ranks then compute the same and `alike` marks it."""
        return x


def read(known: torch.Tensor | None, x: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    """Returns (batch, seq) booleans that are False for padding, and seq, the number of tokens of a whole row.

    The booleans are None if there is no padding. `known` is a result of `WholeRows.told`; the shape (0, seq)
    means that there is no padding. `x` is (batch, tokens on this rank, ...).
    """
    if known is None:
        return None, x.shape[1]
    return (known.to(x.device) if known.shape[0] == x.shape[0] else None), known.shape[1]


# Takes (batch, heads, seq, head_dim) queries, keys and values, the mask (batch, 1, 1, seq), False for keys to
# ignore, the dropout, and whether a query also ignores later keys.
attend = F.scaled_dot_product_attention
