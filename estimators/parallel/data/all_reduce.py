"""Gradients summed in one call after the backward pass: for a collective without means of its own."""

from __future__ import annotations

import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel.gradient_sync import PlainSync


class AllReduceSync(PlainSync):
    """All gradients of a step as one flat tensor per dtype, behind them who had one."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, collective: Collective) -> None:
        super().__init__(module, optimizer)
        self._collective = collective
        self._trained = [p for p in module.parameters() if p.requires_grad]

    def reduce(self) -> None:
        """Also for a rank without rows in this step: it adds zeros, and had no gradient."""
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self._trained:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for parameters in by_dtype.values():
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            # Small whole numbers, so exact in 16 bits as well: 1 and 0 summed over up to 256 ranks.
            had = gradients[0].new_tensor([float(p.grad is not None) for p in parameters])
            total = self._collective.all_reduce(torch.cat([*(g.flatten() for g in gradients), had]))
            *sums, counts = torch.split(total, [*(p.numel() for p in parameters), len(parameters)])
            for parameter, summed, count in zip(parameters, sums, counts.tolist(), strict=True):
                # None where no rank had one, so that no optimizer decays or moves the parameter.
                parameter.grad = summed.view_as(parameter) if count else None
