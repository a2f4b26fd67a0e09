"""A user's network, which `ringspark verify` imports."""

import torch
from torch import nn

from ringspark.estimators.training.settings.config import UserObjects


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def make() -> Network:
    torch.manual_seed(0)
    return Network()


def objects() -> UserObjects:
    return UserObjects(module=make())
