"""Multi-layer perceptron: a chain of dense blocks and a linear head.

The blocks are the items of one `nn.Sequential`, `trunk`, so that activation checkpointing has a
chain to cut into segments.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import nn

from ringspark.models.chain import Link

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


class DenseBlock(nn.Module):
    """Affine map, normalisation, activation, dropout: (batch, in_dim) -> (batch, out_dim)."""

    def __init__(self, in_dim: int, out_dim: int, activation: str, dropout: float, norm: str) -> None:
        super().__init__()
        # Batch normalisation would subtract the bias again.
        self.linear = nn.Linear(in_dim, out_dim, bias=norm != "batch")
        self.norm = NORMS[norm](out_dim)
        self.activation = ACTIVATIONS[activation]()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Runs the block on (batch, in_dim)."""
        out: torch.Tensor = self.dropout(self.activation(self.norm(self.linear(x))))
        return out


def dense_trunk(
    in_dim: int, hidden: Sequence[int], activation: str = "relu", dropout: float = 0.0, norm: str = "none"
) -> nn.Sequential:
    """Makes a chain of dense blocks, one for each width in `hidden`; the identity if there is none.

    Raises:
        ValueError: If a width, the dropout, or a name is out of range.
    """
    if any(width < 1 for width in hidden):
        raise ValueError(f"hidden must hold widths of at least 1, got {list(hidden)}")
    check_dropout("dropout", dropout)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if norm not in NORMS:
        raise ValueError(f"norm must be one of {', '.join(NORMS)}, got {norm!r}")
    widths = [in_dim, *hidden]
    return nn.Sequential(*(DenseBlock(a, b, activation, dropout, norm) for a, b in pairwise(widths)))


def trunk_links(trunk: nn.Sequential) -> list[Link]:
    """Returns the blocks of a network's `trunk`."""
    return [Link(f"trunk.{key}", block, (f"trunk.{key}",)) for key, block in trunk.named_children()]


def check_dropout(name: str, probability: float) -> None:
    """Refuses a probability that would leave nothing to learn from."""
    if not 0.0 <= probability < 1.0:
        raise ValueError(f"{name} must be at least 0 and below 1, got {probability}")


class MLP(nn.Module):
    """Dense blocks and a linear head. The outputs are logits or values, without an activation on top.

    Args:
        in_features: Numbers per row.
        hidden: Width of each dense block.
        out_features: Outputs per row.
        activation: A name in `ACTIVATIONS`.
        dropout: Probability of zeroing a hidden unit in training.
        norm: `"none"`, `"batch"` (training needs two rows a batch or more) or `"layer"`.

    Raises:
        ValueError: If an argument is out of range.
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
        if in_features < 1 or out_features < 1:
            raise ValueError(
                f"in_features and out_features must be at least 1, got {in_features} and {out_features}"
            )
        self.trunk = dense_trunk(in_features, hidden, activation, dropout, norm)
        self.head = nn.Linear(hidden[-1] if hidden else in_features, out_features)

    def tensor_plan(self, num_ranks: int) -> dict[str, str]:
        """Returns how tensor parallelism cuts the layers: pairs, of which the second sums for both."""
        names = [f"trunk.{index}.linear" for index in range(len(self.trunk))]
        if any(not isinstance(block.norm, nn.Identity) for block in self.trunk):
            # A normalisation needs all outputs of the layer before it.
            return dict.fromkeys(names, "column_joined")
        plan = {name: "row" if index % 2 else "column" for index, name in enumerate(names)}
        return plan | ({"head": "row"} if len(names) % 2 else {})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, in_features) to (batch, out_features)."""
        out: torch.Tensor = self.head(self.trunk(x))
        return out

    def links(self) -> list[Link]:
        """Returns the blocks and the head."""
        return [*trunk_links(self.trunk), Link("head", self.head, ("head",))]
