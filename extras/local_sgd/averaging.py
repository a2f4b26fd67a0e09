"""Local SGD: every few steps, the weights of all ranks are replaced by their average.

Stich 2019, "Local SGD Converges Fast and Communicates Little". If synchronous steps come first, this is
post-local SGD (Lin et al. 2020). If the period is the whole training, it is one-shot averaging (Zinkevich et
al. 2010).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.options.sync import LocalSGD
from ringspark.extras.local_sgd.compact_sum import start_average
from ringspark.extras.local_sgd.local_sync import LocalSync
from ringspark.extras.local_sgd.rank_optimizer import average_state


class AveragedWeights(LocalSync):
    """Averages weights; after each synchronization they are bitwise equal on all ranks."""

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, collective: Collective, settings: LocalSGD
    ) -> None:
        super().__init__(module, optimizer, collective, settings)
        self._is_one_shot = settings.steps == "training"
        self._optimizer_state: str = settings.optimizer_state
        # Most optimizers make their state in the first step, some in their constructor.
        self._initial_state = {p: _copy(own) for p, own in optimizer.state.items()}

    def _after_step(self) -> None:
        if self._position == self._period:
            self._synchronize()

    def _end_epoch(self) -> None:
        if self._is_one_shot:
            self._show(self._average())
            self._statistics.average()
        elif self._position:
            self._synchronize()

    def _average(self) -> torch.Tensor:
        values = self._weights.read()
        return start_average(values, self._weights.sizes, self._collective, "fp32", "local.weights")()

    def _synchronize(self) -> None:
        self._weights.write(self._average())
        self._statistics.average()
        if self._optimizer_state == "reset":
            self.optimizer.state.clear()
            self.optimizer.state.update({p: _copy(own) for p, own in self._initial_state.items()})
        elif self._optimizer_state == "average":
            average_state(self.optimizer, self._trained, self._collective)
        self._position = 0


def _copy(state: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
