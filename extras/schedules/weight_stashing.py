"""Weight stashing: older weights for micro-batches whose backward pass runs after a later step's update.

Narayanan et al. 2019, "PipeDream". Each step's micro-batches run on a copy of the weights, which also
collects their gradients, so that gradients of two steps do not mix.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class StashedWeights:
    def __init__(self, module: nn.Module) -> None:
        copies: dict[int, nn.Parameter] = {}
        self._places: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is None or not parameter.requires_grad:
                    continue
                # One copy per tied parameter, so that its gradients add up.
                if id(parameter) not in copies:
                    copies[id(parameter)] = nn.Parameter(parameter.detach().clone())
                self._places.append((owner, name, parameter, copies[id(parameter)]))

    @contextmanager
    def use(self) -> Iterator[None]:
        """Sets the module's parameters to the copies; in backward passes too, for recomputed layers."""
        for owner, name, _, copy in self._places:
            setattr(owner, name, copy)
        try:
            yield
        finally:
            for owner, name, parameter, _ in self._places:
                setattr(owner, name, parameter)

    def release(self) -> None:
        with torch.no_grad():
            for _, _, parameter, copy in self._places:
                parameter.grad = copy.grad
