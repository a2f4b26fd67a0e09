"""Networks of tests: layers, and a function of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ringspark.models import ModelSpec


class Net(nn.Module):
    """Computes `compute(self, *inputs)` with `parts`: layers, parameters or plain values by name."""

    def __init__(self, compute: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self._compute = compute
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self._compute(self, *inputs)


@torch.no_grad()
def outputs_of(network: nn.Module, *inputs: torch.Tensor) -> Any:
    return network(*inputs)


def shows(compute: Callable[..., torch.Tensor]) -> Net:
    """Returns a network whose output is `compute(*inputs)`, with a parameter that does not change it."""
    return Net(lambda self, *inputs: compute(*inputs) + 0 * self.zero, zero=nn.Parameter(torch.zeros(1)))


def two_heads() -> Net:
    """Returns a network of two outputs for two inputs per row: two logits, and (batch, 1)."""
    heads = {"kind": nn.Linear(2, 2), "size": nn.Linear(2, 1)}
    return Net(lambda self, x: (self.kind(x), self.size(x)), **heads)


def linear(outputs: int = 1, inputs: int = 2) -> ModelSpec:
    return ModelSpec("linear", {"in_features": inputs, "out_features": outputs})


def mlp(outputs: int = 1, hidden: int = 8, inputs: int = 2) -> ModelSpec:
    return ModelSpec("mlp", {"in_features": inputs, "hidden": [hidden], "out_features": outputs})
