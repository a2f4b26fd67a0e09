"""Local SGD: every few steps the ranks' weights become their average.

Stich 2019, "Local SGD Converges Fast and Communicates Little"; after synchronous steps at the start it is
post-local SGD (Lin et al. 2020, "Don't Use Large Mini-Batches, Use Local SGD"). With "training" as its period
it is one-shot averaging (Zinkevich et al. 2010, "Parallelized Stochastic Gradient Descent"): each rank goes
on with its own weights over all epochs, and their average is what an epoch's end validates and saves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.options.sync import LocalSGD
from ringspark.estimators.parallel.base import GradientSync, MakeOptimizer
from ringspark.estimators.parallel.exchange import Exchange
from ringspark.extras.local_sgd.compact_sum import start_average
from ringspark.extras.local_sgd.local_sync import LocalSync
from ringspark.extras.local_sgd.rank_optimizer import average_state


class LocalAveraging:
    """Own steps, then the average of the weights."""

    def prepare(
        self, module: nn.Module, make_optimizer: MakeOptimizer, collective: Collective, exchange: Exchange
    ) -> GradientSync:
        with torch.no_grad():
            collective.broadcast(list(module.state_dict().values()))
        assert isinstance(exchange.sync, LocalSGD)
        return AveragedWeights(module, make_optimizer(module), collective, exchange.sync)


class AveragedWeights(LocalSync):
    """Weights bitwise equal on all ranks after each meeting."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        collective: Collective,
        settings: LocalSGD,
    ) -> None:
        super().__init__(module, optimizer, collective, settings)
        self._is_one_shot = settings.steps == "training"
        self._optimizer_state: str = settings.optimizer_state
        # Most optimizers make their state in the first step, some in their constructor.
        self._first_state = {p: _copied(own) for p, own in optimizer.state.items()}

    def _after_step(self) -> None:
        if self._position == self._period:
            self._meet()

    def _end_epoch(self) -> None:
        if self._is_one_shot:
            self._show(self._average())
            self._statistics.average()
        elif self._position:
            self._meet()

    def _average(self) -> torch.Tensor:
        values = self._weights.read()
        return start_average(values, self._weights.sizes, self._collective, "fp32", "local.weights")()

    def _meet(self) -> None:
        self._weights.write(self._average())
        self._statistics.average()
        if self._optimizer_state == "reset":
            self.optimizer.state.clear()
            self.optimizer.state.update({p: _copied(own) for p, own in self._first_state.items()})
        elif self._optimizer_state == "average":
            average_state(self.optimizer, self._trained, self._collective)
        self._position = 0


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
