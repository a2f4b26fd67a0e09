"""Several tabular networks side by side, each learning for itself: a deep ensemble in one module.

Lakshminarayanan, Pritzel and Blundell 2017, "Simple and Scalable Predictive Uncertainty Estimation
using Deep Ensembles". The members differ by their initial weights and their dropout. If training
averaged their outputs, they would be one wide network and lose the gain of an ensemble. So in training
a loss `..._per_member` compares every member with the label by itself.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from ringspark.models.tabular import TabularNet


class TabularEnsemble(nn.Module):
    """`members` independent networks of class `TabularNet` over the same columns.

    Args:
        members: Number of networks; time and memory grow with it.
        cardinalities, num_numeric, hidden, out_features, dropout, embedding_dropout: See `TabularNet`.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        members: int,
        cardinalities: Sequence[int],
        num_numeric: int,
        hidden: Sequence[int],
        out_features: int,
        dropout: float = 0.0,
        embedding_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if members < 1:
            raise ValueError(f"members must be at least 1, got {members}")
        self.members = nn.ModuleList(
            TabularNet(
                cardinalities,
                num_numeric,
                hidden,
                out_features,
                dropout=dropout,
                embedding_dropout=embedding_dropout,
            )
            for _ in range(members)
        )

    def forward(self, categorical: torch.Tensor, numeric: torch.Tensor) -> torch.Tensor:
        """Maps (batch, K) indices and (batch, M) numbers to outputs.

        Returns:
            (batch, members, out_features) in training, otherwise the members' mean (batch, out_features).
        """
        outputs = torch.stack([member(categorical, numeric) for member in self.members], dim=1)
        return outputs if self.training else outputs.mean(1)

    def checkpoint_branches(self) -> Iterable[nn.Module]:
        """Returns the parts that activation checkpointing treats as separate networks."""
        return self.members
