"""Sums gradients in one call after the backward pass, for a collective that has no exchange of its own."""

from __future__ import annotations

import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel.base import PlainSync


class AllReduceSync(PlainSync):
    """Sums one flat tensor per dtype: all gradients of a step, then a flag for each that the rank had."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, collective: Collective) -> None:
        super().__init__(module, optimizer)
        self._collective = collective
        self._trained = [p for p in module.parameters() if p.requires_grad]

    def reduce(self) -> None:
        """Sums the gradients; a rank without rows in this step adds zeros, and flags no gradient."""
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self._trained:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for parameters in by_dtype.values():
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            # Sums of 1 and 0 over up to 256 ranks are small whole numbers, exact in 16 bits as well.
            had = gradients[0].new_tensor([float(p.grad is not None) for p in parameters])
            total = self._collective.all_reduce(torch.cat([*(g.flatten() for g in gradients), had]))
            *sums, counts = torch.split(total, [*(p.numel() for p in parameters), len(parameters)])
            for parameter, summed, count in zip(parameters, sums, counts.tolist(), strict=True):
                # None if no rank had a gradient, so that no optimizer decays or moves the parameter.
                parameter.grad = summed.view_as(parameter) if count else None
