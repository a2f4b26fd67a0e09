"""A bag-of-words text classifier (Joulin et al. 2017, "Bag of Tricks for Efficient Text Classification")."""

from __future__ import annotations

import torch
from torch import nn

from ringspark.models.checks import check_dropout, check_sizes


class EmbeddingMean(nn.Module):
    """Averages the embeddings of each row's tokens, then applies dropout and a linear head; outputs logits.

    Args:
        vocab_size: Number of token ids; ids run from 0 to `vocab_size - 1`.
        dim: Width of the embeddings.
        out_features: Outputs per row.
        dropout: Dropout probability on the mean.
    """

    def __init__(self, vocab_size: int, dim: int, out_features: int, dropout: float = 0.0) -> None:
        super().__init__()
        check_sizes(vocab_size=vocab_size, dim=dim, out_features=out_features)
        check_dropout("dropout", dropout)
        self.tokens = nn.Embedding(vocab_size, dim)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(dim, out_features)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Maps (batch, seq) ids and a (batch, seq) mask, 0 for padding, to (batch, out_features)."""
        vectors = self.tokens(ids)  # (batch, seq, dim)
        real = mask.unsqueeze(-1).to(vectors.dtype)
        # A row without tokens has the mean 0.
        mean = (vectors * real).sum(1) / real.sum(1).clamp(min=1)
        out: torch.Tensor = self.head(self.dropout(mean))
        return out
