"""Linear and logistic regression, the baselines for every other network."""

import torch
from torch import nn

from ringspark.models.checks import check_sizes


class Linear(nn.Module):
    """One affine map: (batch, in_features) -> (batch, out_features).

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
