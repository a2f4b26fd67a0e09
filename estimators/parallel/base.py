"""What a parallelization strategy is to the trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel.gradient_sync import GradientSync

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Strategy(Protocol):
    """Spreads a module over the ranks."""

    def prepare(
        self, module: nn.Module, make_optimizer: MakeOptimizer, collective: Collective, micro_batches: int
    ) -> GradientSync:
        """Ties the module to its copies or parts on the other ranks. Runs on every rank.

        The optimizer is made here, by the factory: a strategy may first change the parameters.

        Args:
            module: On the rank's device, activation checkpointing applied.
            make_optimizer: Makes the optimizer over the trainable parameters of a module.
            micro_batches: Backward passes per optimizer step, at most.
        """
