"""Data parallelism: every rank has the whole network and a share of each global batch."""

from __future__ import annotations

import torch
from torch import nn

from ringspark.estimators.collectives import Collective, GradientSync
from ringspark.estimators.parallel.base import MakeOptimizer


class DataParallel:
    """Equal weights at the start, summed gradients in every step, so equal weights for ever."""

    def prepare(
        self, module: nn.Module, make_optimizer: MakeOptimizer, collective: Collective, micro_batches: int
    ) -> GradientSync:
        with torch.no_grad():
            collective.broadcast(list(module.state_dict().values()))
        optimizer = make_optimizer(module)
        return collective.synchronize(module, optimizer, micro_batches)
