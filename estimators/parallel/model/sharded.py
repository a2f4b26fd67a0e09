"""Sharding over a mesh: which ranks cut the optimizer's state and the gradients of which parameters.

What a rank has of the network counts as its network, whatever cut it: a sharding cuts the state of these
parameters once more, over ranks that have the same ones. Parameters of experts are on other ranks than the
rest, so they are cut and summed over their own.
"""

from __future__ import annotations

import torch

from ringspark.estimators.parallel.base import GradientSync, MakeOptimizer
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.parallel.model.expert import expert_names
from ringspark.estimators.parallel.model.expert_rounds import Around, ExpertRounds
from ringspark.estimators.parallel.sharded.zero import ShardedSync, Sharing


class ExpertShards(ExpertRounds, ShardedSync):
    """ZeRO 1 and 2 where ranks have other experts; passes without rows for the others' sake.

    Buckets leave when a micro-batch's backward pass is over. In the middle of it, a rank would wait for one
    that waits for its experts.
    """


def sharded(
    module: torch.nn.Module,
    make_optimizer: MakeOptimizer,
    mesh: RankMesh,
    *,
    passes: int,
    micro_batches: int,
    during_backward: bool,
    around: Around,
) -> GradientSync:
    """Ties this rank's part of a network to the others', and makes its optimizer. Runs on every rank.

    Args:
        passes: See `ExpertRounds.serve`.
        micro_batches: The most backward passes per optimizer step.
        during_backward: Whether gradients are cut too (ZeRO 2), or the optimizer's state alone (ZeRO 1).
        around: Makes the context of a forward pass, autocast.
    """
    if not mesh.cuts_network:  # parts of a network have been cut from equal ones
        with torch.no_grad():
            mesh.world.broadcast(list(module.state_dict().values()))
    optimizer = make_optimizer(module)
    rounds = micro_batches if during_backward else None
    if mesh.sizes["expert"] == 1:
        return ShardedSync(module, optimizer, [Sharing(mesh.sharers)], rounds)
    experts = expert_names(module)
    sharings = [
        Sharing(mesh.sharers, lambda name: name not in experts),
        Sharing(mesh.expert_sharers, lambda name: name in experts, ("sequence",)),
    ]
    sync = ExpertShards(module, optimizer, sharings, rounds, reacts=False)
    sync.serve(passes, around)
    return sync
