"""Linear and logistic regression, the baselines for every other network."""

import torch
from torch import nn


class Linear(nn.Module):
    """One affine map.

    With a squared loss it is linear regression. With a cross-entropy loss its outputs are logits, which
    makes it logistic regression (one output, or one per class).

    Args:
        in_features: Numbers per row.
        out_features: Outputs per row.

    Raises:
        ValueError: If a size is not positive.
    """

    def __init__(self, in_features: int, out_features: int = 1) -> None:
        super().__init__()
        if in_features < 1 or out_features < 1:
            raise ValueError(
                f"in_features and out_features must be at least 1, got {in_features} and {out_features}"
            )
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, in_features) to (batch, out_features)."""
        out: torch.Tensor = self.linear(x)
        return out
