"""Data parallelism: every rank has the whole network and a share of each global batch."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel.base import GradientSync, MakeOptimizer, PlainSync
from ringspark.estimators.parallel.data.all_reduce import AllReduceSync

# Name of a collective -> (module, class) that exchange gradients with that library's own means, which overlap
# the exchange with the backward pass. For any other collective, one call of its `all_reduce` sums them.
SYNCS: dict[str, tuple[str, str]] = {
    "horovod": ("ringspark.estimators.parallel.data.horovod_sync", "HorovodSync"),
    "torch": ("ringspark.estimators.parallel.data.ddp", "DdpSync"),
}


class DataParallel:
    """Keeps the weights equal: all ranks start with the same and sum the gradients in every step."""

    def prepare(
        self, module: nn.Module, make_optimizer: MakeOptimizer, collective: Collective, micro_batches: int
    ) -> GradientSync:
        with torch.no_grad():
            collective.broadcast(list(module.state_dict().values()))
        return synchronize(module, make_optimizer(module), collective, micro_batches)


def synchronize(
    module: nn.Module, optimizer: torch.optim.Optimizer, collective: Collective, micro_batches: int
) -> GradientSync:
    """Ties a module's gradients together over the ranks. Runs on every rank.

    Args:
        module: The module, whose weights must already be equal on all ranks.
        micro_batches: The most backward passes per optimizer step.
    """
    if collective.size == 1:
        return PlainSync(module, optimizer)
    if collective.name not in SYNCS:
        return AllReduceSync(module, optimizer, collective)
    file, class_name = SYNCS[collective.name]
    kind = getattr(import_module(file), class_name)
    sync: GradientSync = kind(module, optimizer, collective, micro_batches)
    return sync
