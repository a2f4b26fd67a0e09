"""A deep ensemble of tabular networks in one module.

Lakshminarayanan, Pritzel and Blundell 2017, "Simple and Scalable Predictive Uncertainty Estimation using Deep
Ensembles". Losses with names that end in `_per_member` compare each member with the label.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from ringspark.extras.tables.tabular import TabularNet
from ringspark.models.checks import check_sizes


class TabularEnsemble(nn.Module):
    """`members` independent networks of class `TabularNet` over the same columns.

    Args:
        members: Number of networks. Time and memory are proportional to it.
        cardinalities, num_numeric, hidden, out_features, dropout, embedding_dropout: See `TabularNet`.
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
        check_sizes(members=members)
        columns = (cardinalities, num_numeric)
        self.members = nn.ModuleList(
            TabularNet(*columns, hidden, out_features, None, dropout, embedding_dropout)
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
        """Returns the member networks; activation checkpointing divides each one into segments separately."""
        return self.members
