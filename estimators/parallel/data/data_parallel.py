"""Data parallelism: every rank has the whole network and a share of each global batch."""

from __future__ import annotations

import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel.base import GradientSync, MakeOptimizer, PlainSync
from ringspark.estimators.parallel.data.gradient_sum import SummedGradients
from ringspark.estimators.parallel.exchange import Exchange


class DataParallel:
    """Keeps the weights equal: all ranks start with the same and sum the gradients in every step."""

    def prepare(
        self, module: nn.Module, make_optimizer: MakeOptimizer, collective: Collective, exchange: Exchange
    ) -> GradientSync:
        with torch.no_grad():
            collective.broadcast(list(module.state_dict().values()))
        return synchronize(module, make_optimizer(module), collective, measures_local=exchange.noise_scale)


def synchronize(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    collective: Collective,
    *,
    measures_local: bool = False,
) -> GradientSync:
    """Ties the gradients of a module, whose weights are equal on all ranks, together. Runs on every rank."""
    if collective.size == 1:
        return PlainSync(module, optimizer)
    return SummedGradients(module, optimizer, collective, measures_local=measures_local)
