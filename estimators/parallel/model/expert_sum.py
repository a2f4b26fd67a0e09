"""Sums the gradients of a network whose experts are spread over ranks that read different rows.

A rank's experts have computed tokens of all ranks of their axis, so their gradients are summed over the ranks
that have the same experts; those of everything else over all ranks.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Literal

import torch
from torch import nn

from ringspark.estimators.parallel.data.gradient_sum import SummedGradients
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.parallel.model.expert import expert_names
from ringspark.estimators.parallel.model.expert_rounds import Around, ExpertRounds


class ExpertSum(ExpertRounds, SummedGradients):
    """Gradients summed over the ranks that have the parameter; passes without rows for the others' sake."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        mesh: RankMesh,
        *,
        rounds: int,
        around: Around = nullcontext,
        bucket_bytes: int | Literal["chosen"] | None = "chosen",
    ) -> None:
        """Ties the gradients together.

        Args:
            module: This rank's part of the network; `spread_experts` has cut it.
            rounds: See `ExpertRounds.serve`.
            around: See `ExpertRounds.serve`.
            bucket_bytes: See `SummedGradients`.
        """
        experts = expert_names(module)
        SummedGradients.__init__(
            self,
            module,
            optimizer,
            mesh.gradients,
            over=lambda name: mesh.expert_gradients if name in experts else mesh.gradients,
            bucket_bytes=bucket_bytes,
        )
        # An overflow in some experts is known to their ranks alone.
        self.ranks_differ = True
        self.serve(rounds, around)
