"""Gradient synchronization for expert parallelism: ranks have different experts and different rows.

Every rank runs the same number of passes, because its experts compute other ranks' tokens.
"""

from __future__ import annotations

import torch
from torch import nn

from ringspark.estimators.parallel.base import GradientSync, MakeOptimizer, SyncSettings, share_weights
from ringspark.estimators.parallel.data.gradient_all_reduce import GradientAllReduce
from ringspark.estimators.parallel.empty_passes import EmptyPasses
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.parallel.sharded.zero import SyncGroup, ZeroSync
from ringspark.extras.model_parallel.expert import expert_names


def num_empty_passes(mesh: RankMesh, settings: SyncSettings) -> int:
    return 0 if mesh.sizes["pipeline"] > 1 else settings.micro_batches


class ExpertAllReduce(EmptyPasses, GradientAllReduce):
    """Each gradient is all-reduced over the ranks that have the parameter."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        mesh: RankMesh,
        settings: SyncSettings,
    ) -> None:
        experts = expert_names(module)
        GradientAllReduce.__init__(
            self,
            module,
            optimizer,
            mesh.gradients,
            over=lambda name: mesh.expert_gradients if name in experts else mesh.gradients,
        )
        # Only the ranks that hold an expert see its overflow, so ranks must agree.
        self.ranks_differ = True
        self.add_empty_passes(num_empty_passes(mesh, settings), settings.autocast)

    @classmethod
    def prepare(
        cls, module: nn.Module, make_optimizer: MakeOptimizer, mesh: RankMesh, settings: SyncSettings
    ) -> GradientSync:
        share_weights(module, mesh)
        return cls(module, make_optimizer(module), mesh, settings)


class ExpertZeroSync(EmptyPasses, ZeroSync):
    """ZeRO 1 if ranks have different experts.

    It sends gradients between backward passes, never inside one, because a backward pass may wait for other
    ranks' experts.
    """

    @classmethod
    def synchronize(
        cls, module: nn.Module, optimizer: torch.optim.Optimizer, mesh: RankMesh, settings: SyncSettings
    ) -> GradientSync:
        experts = expert_names(module)
        groups = [
            SyncGroup(mesh.shard_group, lambda name: name not in experts),
            SyncGroup(mesh.expert_shard_group, lambda name: name in experts, ("sequence",)),
        ]
        sync = cls(module, optimizer, groups, cls.num_rounds(settings), reacts=False)
        sync.add_empty_passes(num_empty_passes(mesh, settings), settings.autocast)
        return sync


class ExpertZeroGradientSync(ExpertZeroSync):
    """ZeRO 2 if ranks have different experts."""

    during_backward = True
