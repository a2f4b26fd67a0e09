"""Entity-embedding network for tables of categories and numbers.

Guo and Berkhahn 2016, "Entity Embeddings of Categorical Variables".
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from ringspark.models.chain import Link
from ringspark.models.checks import check_dropout, check_sizes
from ringspark.models.mlp import dense_trunk, trunk_links


def embedding_dim(cardinality: int) -> int:
    """Returns the embedding width for n categories: fastai's rule of thumb, 1.6 n^0.56, at most 50."""
    return max(1, min(50, round(1.6 * math.pow(cardinality, 0.56))))


class TabularNet(nn.Module):
    """Embeds K categorical columns, joins them with M numbers, and applies dense blocks and a linear head.

    Args:
        cardinalities: Number of indices of each categorical column. For a column of Spark's
            `StringIndexer(handleInvalid="keep")` this is the number of labels plus 1.
        num_numeric: Numbers per row.
        hidden: Width of each dense block.
        out_features: Outputs per row (logits or values).
        embedding_dims: Width of each embedding; None means the width that `embedding_dim` returns.
        dropout: Probability of zeroing a hidden unit in training.
        embedding_dropout: Probability of zeroing each number of an embedding in training. It reduces
            overfitting on a column that nearly identifies the row, such as an aircraft's registration.
        activation: A name in `ringspark.models.mlp.ACTIVATIONS`.
        norm: `"none"`, `"batch"` or `"layer"`, in every dense block.

    Raises:
        ValueError: If an argument is out of range, or there is no input at all.
    """

    def __init__(
        self,
        cardinalities: Sequence[int],
        num_numeric: int,
        hidden: Sequence[int],
        out_features: int,
        embedding_dims: Sequence[int] | None = None,
        dropout: float = 0.0,
        embedding_dropout: float = 0.0,
        activation: str = "relu",
        norm: str = "none",
    ) -> None:
        super().__init__()
        dims = [embedding_dim(n) for n in cardinalities] if embedding_dims is None else list(embedding_dims)
        if len(dims) != len(cardinalities):
            raise ValueError(
                f"embedding_dims must have one width for each of {len(cardinalities)} categorical columns, "
                f"got {len(dims)}"
            )
        if min([*cardinalities, *dims], default=1) < 1:
            raise ValueError(
                f"cardinalities and embedding_dims must be at least 1, got {list(cardinalities)} and {dims}"
            )
        if num_numeric < 0 or num_numeric + len(dims) == 0:
            raise ValueError(f"there must be a categorical or numeric column, got num_numeric={num_numeric}")
        check_sizes(out_features=out_features)
        check_dropout("embedding_dropout", embedding_dropout)
        self.num_numeric = num_numeric
        self.embeddings = nn.ModuleList(
            nn.Embedding(n, dim) for n, dim in zip(cardinalities, dims, strict=True)
        )
        self.embedding_dropout = nn.Dropout(embedding_dropout)
        in_dim = sum(dims) + num_numeric
        self.trunk = dense_trunk(in_dim, hidden, activation, dropout, norm)
        self.head = nn.Linear(hidden[-1] if hidden else in_dim, out_features)
        for table in self.embeddings.parameters():
            # PyTorch's N(0, 1) would drown the standardized numbers in the noise of rare categories.
            nn.init.normal_(table, std=0.05)

    def forward(self, categorical: torch.Tensor, numeric: torch.Tensor) -> torch.Tensor:
        """Maps (batch, K) indices and (batch, M) numbers to (batch, out_features).

        Raises:
            ValueError: If the number of columns is wrong, or if an index exceeds its column's cardinality.
                Indices are checked on the CPU only.
        """
        out: torch.Tensor = self.head(self.trunk(self._concatenate(categorical, numeric)))
        return out

    def links(self) -> list[Link]:
        embed = Link("embeddings", self._concatenate, ("embeddings", "embedding_dropout"))
        return [embed, *trunk_links(self.trunk), Link("head", self.head, ("head",))]

    def _concatenate(self, categorical: torch.Tensor, numeric: torch.Tensor) -> torch.Tensor:
        num_categorical = len(self.embeddings)
        if categorical.shape[1:] != (num_categorical,) or numeric.shape[1:] != (self.num_numeric,):
            raise ValueError(
                f"TabularNet takes (batch, {num_categorical}) categories and (batch, {self.num_numeric}) "
                f"numbers, got {tuple(categorical.shape)} and {tuple(numeric.shape)}"
            )
        vectors = [self._embed(column, categorical[:, column]) for column in range(num_categorical)]
        if not vectors:
            return numeric
        embedded = self.embedding_dropout(torch.cat(vectors, dim=1))  # (batch, sum of dims)
        return torch.cat([embedded, numeric], dim=1)

    def _embed(self, column: int, indices: torch.Tensor) -> torch.Tensor:
        table = self.embeddings[column]
        assert isinstance(table, nn.Embedding)
        try:
            out: torch.Tensor = table(indices)
        except IndexError as error:
            # Not checked before: a check in every batch would stall a GPU.
            raise ValueError(
                f"categorical column {column} takes indices 0 to {table.num_embeddings - 1}, "
                f"got {int(indices.min())} to {int(indices.max())}"
            ) from error
        return out


class TabularEnsemble(nn.Module):
    """A deep ensemble: `members` independent networks of class `TabularNet` over the same columns.

    Lakshminarayanan, Pritzel and Blundell 2017, "Simple and Scalable Predictive Uncertainty Estimation using
    Deep Ensembles". Losses with names that end in `_per_member` compare each member with the label.

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
