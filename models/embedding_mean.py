"""A text classifier without order: a linear head on the mean of the tokens' embeddings.

Joulin et al. 2017, "Bag of Tricks for Efficient Text Classification". It sees no word order, trains in
seconds on a CPU, and is what a transformer has to beat.
"""

from __future__ import annotations

import torch
from torch import nn

from ringspark.models.mlp import check_dropout


class EmbeddingMean(nn.Module):
    """Embeddings of token ids, their mean over a row, dropout, and a linear head; the outputs are logits.

    Args:
        vocab_size: Number of token ids, which run from 0 to `vocab_size - 1`.
        dim: Width of the embeddings.
        out_features: Outputs per row.
        dropout: Dropout probability on the mean.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(self, vocab_size: int, dim: int, out_features: int, dropout: float = 0.0) -> None:
        super().__init__()
        for name, size in (("vocab_size", vocab_size), ("dim", dim), ("out_features", out_features)):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        check_dropout("dropout", dropout)
        self.tokens = nn.Embedding(vocab_size, dim)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(dim, out_features)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Maps (batch, seq) ids and a mask, which is 0 where a row is filled up, to (batch, out_features)."""
        vectors = self.tokens(ids)  # (batch, seq, dim)
        real = mask.unsqueeze(-1).to(vectors.dtype)
        # A row without tokens has the mean 0.
        mean = (vectors * real).sum(1) / real.sum(1).clamp(min=1)
        out: torch.Tensor = self.head(self.dropout(mean))
        return out
