"""Sums gradients of which each rank along 'tensor' has a part, as it used the parameter for its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ringspark.estimators.collectives import Collective


class PartialGradients:
    """The parameters between the regions that are cut, once for each step: all in one all-reduce."""

    def __init__(self, module: nn.Module, cut: Sequence[str], collective: Collective) -> None:
        """Finds the parameters.

        Args:
            module: This rank's part of the network.
            cut: Names of the parameters that are cut: their gradients are whole where they are.
        """
        self._parameters = [p for name, p in module.named_parameters() if name not in set(cut)]
        self._collective = collective

    def add(self) -> None:
        """Makes the gradients whole, in place. Runs on every rank, after the last backward pass of a step."""
        for parameter in self._parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                # The ranks looked up other rows.
                parameter.grad = parameter.grad.to_dense()
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            own = [gradient for gradient in gradients if gradient.dtype == dtype]
            flat = self._collective.all_reduce(torch.cat([gradient.reshape(-1) for gradient in own]))
            pieces = torch.split(flat, [gradient.numel() for gradient in own])
            for gradient, piece in zip(own, pieces, strict=True):
                gradient.copy_(piece.view_as(gradient))
