"""What a network over tokens asks of its rows: the part that it sees, sums over all tokens, whole outputs.

Here every row is whole, so the answers are plain. Where a row is spread over several ranks, other classes
with the same methods, and other functions in the place of `attend`, give each rank its part of the tokens. A
network can be spread if it has an attribute `rows`, asks it as the transformers here do, and attends by the
attribute `attend` of its modules.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class WholeRows:
    """Every token is here. The methods say what holds where a row is spread.

    Between `pool` and `alike` a network computes from whole rows, which is the same on all ranks of a row.
    What it draws at random there must be the same too.

    Attributes:
        is_spread: Whether a rank may have a part of the tokens only.
    """

    is_spread = False

    def own(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns the part of `x` that belongs to the tokens of this rank; no gradient flows back.

        Args:
            x: Something about all tokens, such as ids, the same on all ranks of a row.
            dim: The dimension of the tokens.
        """
        return x

    def embedded(self, table: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings of this rank's tokens, (batch, own tokens, dim).

        Args:
            table: Maps ids to embeddings.
            ids: (batch, seq), of all tokens. A pass of the network begins here.
        """
        found: torch.Tensor = table(self.own(ids, 1))
        return found

    def mask(self, mask: torch.Tensor | None, seq: int) -> torch.Tensor | None:
        """Returns what `attend` gets as its mask: of all tokens, and something also where there was none.

        Args:
            mask: (batch, 1, 1, seq) booleans, False where no token attends to; None if there is no such.
            seq: Number of all tokens.
        """
        return mask

    def told(self, tokens: torch.Tensor | None, seq: int) -> torch.Tensor | None:
        """Returns what the later parts of a network, which see no ids, are told of a row: see `read`.

        Args:
            tokens: (batch, seq) booleans, the tokens that count; None if all do.
            seq: Number of all tokens.
        """
        return tokens

    def pool(self, x: torch.Tensor, tokens: torch.Tensor | None, seq: int) -> torch.Tensor:
        """Returns the mean over all tokens, (batch, dim).

        Args:
            x: (batch, own tokens, dim).
            tokens: (batch, seq) booleans, the tokens that count; None if all do.
            seq: Number of all tokens.
        """
        if tokens is None:
            return x.mean(1)
        real = tokens.unsqueeze(-1).to(x.dtype)  # (batch, seq, 1)
        return (x * real).sum(1) / real.sum(1).clamp(min=1)

    def alike(self, outputs: torch.Tensor) -> torch.Tensor:
        """Marks outputs that every rank of a row computed from `pool`: their gradients count once."""
        return outputs

    def joined(self, x: torch.Tensor, dim: int, seq: int) -> torch.Tensor:
        """Returns what all ranks of a row have, in the order of the tokens: outputs that leave the network.

        Args:
            x: Something about the tokens of this rank.
            dim: The dimension of the tokens.
            seq: Number of all tokens.
        """
        return x


def read(told: torch.Tensor | None, x: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    """Returns the tokens that count, (batch, seq), or None if all do, and the number of all tokens.

    Args:
        told: What `told` returned: (batch, seq), or of no rows, where its shape alone is looked at; or None.
        x: (batch, own tokens, ...).
    """
    if told is None:
        return None, x.shape[1]
    return (told.to(x.device) if told.shape[0] == x.shape[0] else None), told.shape[1]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
) -> torch.Tensor:
    """Returns each query's mean of the values, (batch, heads, seq, head_dim).

    Args:
        query, key, value: (batch, heads, seq, head_dim).
        mask: (batch, 1, 1, seq) booleans, False for keys to be left out; None if there are none.
        dropout: Probability at which a weight is dropped; 0 in evaluation.
        causal: Whether a query sees only its own key and those before.
    """
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal
    )
