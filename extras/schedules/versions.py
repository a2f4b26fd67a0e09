"""Older weights, for micro-batches whose backward pass comes after a later step's update.

Narayanan et al. 2019, "PipeDream", call it weight stashing: a micro-batch's backward pass must see the
weights of its forward pass, or its gradient is that of no function. Each step's micro-batches run on a copy
of their own, which also collects their gradients, so that those of two steps do not mix. A copy lives until
its step's last backward pass; where nothing outlives its step, there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class WeightVersion:
    """The parameters of a module at one step, and gradients for them."""

    def __init__(self, module: nn.Module) -> None:
        copies: dict[int, nn.Parameter] = {}
        self._places: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is None or not parameter.requires_grad:
                    continue
                # One copy for a parameter in several places: its gradients add up.
                if id(parameter) not in copies:
                    copies[id(parameter)] = nn.Parameter(parameter.detach().clone())
                self._places.append((owner, name, parameter, copies[id(parameter)]))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts the copies into the module; in backward passes too, where recomputed layers run again."""
        for owner, name, _, copy in self._places:
            setattr(owner, name, copy)
        try:
            yield
        finally:
            for owner, name, parameter, _ in self._places:
                setattr(owner, name, parameter)

    def release(self) -> None:
        """Gives the parameters the gradients of their copies."""
        with torch.no_grad():
            for _, _, parameter, copy in self._places:
                parameter.grad = copy.grad
