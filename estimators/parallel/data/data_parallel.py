"""Data parallelism: ranks have equal weights and read different rows of each global batch."""

from __future__ import annotations

import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel.base import GradientSync, MakeOptimizer, share_weights
from ringspark.estimators.parallel.data.gradient_all_reduce import GradientAllReduce
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.parallel.sync_settings import SyncSettings


class DataParallel:
    """All-reduces the gradients in every step."""

    takes_sparse = True

    def prepare(
        self, module: nn.Module, make_optimizer: MakeOptimizer, mesh: RankMesh, settings: SyncSettings
    ) -> GradientSync:
        share_weights(module, mesh)
        return synchronize(
            module, make_optimizer(module), mesh.gradients, measures_local=settings.noise_scale
        )


def synchronize(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    collective: Collective,
    *,
    measures_local: bool = False,
    prefix: str = "gradients",
) -> GradientSync:
    if collective.size == 1:
        return GradientSync(module, optimizer)
    return GradientAllReduce(module, optimizer, collective, measures_local=measures_local, prefix=prefix)
