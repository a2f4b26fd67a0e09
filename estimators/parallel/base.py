"""The interface between the trainer and a parallelization strategy."""

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

        The strategy calls the factory of the optimizer, because it may change the parameters first.

        Args:
            module: The module on the rank's device, with activation checkpointing applied.
            make_optimizer: Makes the optimizer over the trainable parameters of a module.
            micro_batches: The most backward passes per optimizer step.
        """
