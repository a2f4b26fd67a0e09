"""Linear regression, and a multi-layer perceptron: dense blocks in `trunk`, followed by a linear head."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import nn

from ringspark.models.chain import Link
from ringspark.models.checks import check_choice, check_dropout, check_sizes

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "none": lambda _: nn.Identity(),
    "batch": nn.BatchNorm1d,
    "layer": nn.LayerNorm,
}


class Linear(nn.Module):
    """One affine map: (batch, in_features) -> (batch, out_features), the baseline for every other network.

    With a squared loss it is linear regression. With cross entropy on the outputs as logits, it is logistic
    regression.
    """

    def __init__(self, in_features: int, out_features: int = 1) -> None:
        super().__init__()
        check_sizes(in_features=in_features, out_features=out_features)
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        return out


class DenseBlock(nn.Module):
    """Affine map, normalization, activation, dropout: (batch, in_dim) -> (batch, out_dim)."""

    def __init__(self, in_dim: int, out_dim: int, activation: str, dropout: float, norm: str) -> None:
        super().__init__()
        # Batch normalization would subtract the bias again.
        self.linear = nn.Linear(in_dim, out_dim, bias=norm != "batch")
        self.norm = NORMS[norm](out_dim)
        self.activation = ACTIVATIONS[activation]()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.dropout(self.activation(self.norm(self.linear(x))))
        return out


def dense_trunk(
    in_dim: int, hidden: Sequence[int], activation: str = "relu", dropout: float = 0.0, norm: str = "none"
) -> nn.Sequential:
    if any(width < 1 for width in hidden):
        raise ValueError(f"hidden must hold widths of at least 1, got {list(hidden)}")
    check_dropout("dropout", dropout)
    check_choice("activation", activation, ACTIVATIONS)
    check_choice("norm", norm, NORMS)
    widths = [in_dim, *hidden]
    return nn.Sequential(*(DenseBlock(a, b, activation, dropout, norm) for a, b in pairwise(widths)))


def trunk_links(trunk: nn.Sequential) -> list[Link]:
    return [Link(f"trunk.{key}", block, (f"trunk.{key}",)) for key, block in trunk.named_children()]


class MLP(nn.Module):
    """Dense blocks and a linear head: (batch, in_features) -> (batch, out_features) logits or values.

    Args:
        in_features: Numbers per row.
        hidden: Width of each dense block.
        out_features: Outputs per row.
        activation: A name in `ACTIVATIONS`.
        dropout: Probability of zeroing a hidden unit in training.
        norm: `"none"`, `"batch"` (training needs at least two rows per batch) or `"layer"`.
    """

    def __init__(
        self,
        in_features: int,
        hidden: Sequence[int],
        out_features: int,
        activation: str = "relu",
        dropout: float = 0.0,
        norm: str = "none",
    ) -> None:
        super().__init__()
        check_sizes(in_features=in_features, out_features=out_features)
        self.trunk = dense_trunk(in_features, hidden, activation, dropout, norm)
        self.head = nn.Linear(hidden[-1] if hidden else in_features, out_features)

    def tensor_plan(self, num_ranks: int) -> dict[str, str]:
        """Returns how tensor parallelism shards the layers: column-wise and row-wise alternately."""
        names = [f"trunk.{index}.linear" for index in range(len(self.trunk))]
        if any(not isinstance(block.norm, nn.Identity) for block in self.trunk):
            # A normalization needs all outputs of the layer before it.
            return dict.fromkeys(names, "column_joined")
        plan = {name: "row" if index % 2 else "column" for index, name in enumerate(names)}
        return plan | ({"head": "row"} if len(names) % 2 else {})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.trunk(x))
        return out

    def links(self) -> list[Link]:
        return [*trunk_links(self.trunk), Link("head", self.head, ("head",))]
