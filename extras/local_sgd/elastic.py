"""Elastic averaging: every few steps, the ranks' weights and a central copy move towards each other.

The central copy is the trained model.

Zhang, Choromanska and LeCun 2015, "Deep learning with Elastic Averaging SGD", in its synchronous form. Rank i
has weights x_i, the centre is c, and d_i = x_i - c. At each synchronization x_i becomes x_i - alpha d_i, and
c becomes c + alpha sum(d_i).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.options.sync import ElasticAveraging
from ringspark.estimators.parallel.base import apply_change
from ringspark.extras.local_sgd.local_sync import LocalSync

# The paper's beta: alpha times the number of ranks, with which the centre moves.
BETA = 0.9


class ElasticSync(LocalSync):
    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        collective: Collective,
        settings: ElasticAveraging,
    ) -> None:
        self._alpha: float = BETA / collective.size if settings.alpha is None else settings.alpha
        super().__init__(module, optimizer, collective, settings)

    def _begin_local(self) -> None:
        self._centre = self._weights.read()

    def _after_step(self) -> None:
        if self._position == self._period:
            self._pull()

    def _end_epoch(self) -> None:
        if self._position:
            self._pull()
        self._show(self._centre)

    def _apply_change(self, before: torch.Tensor, after: torch.Tensor) -> None:
        super()._apply_change(before, after)
        self._centre = apply_change(self._centre, before, after)

    def _pull(self) -> None:
        own = self._weights.read()
        away = (own - self._centre).mul_(self._alpha)
        self._weights.write(own.sub_(away))
        self._collective.start_sum(away, "local.centre")()
        self._centre += away
        self._statistics.average()
        self._position = 0

    def _shared_state(self) -> dict[str, torch.Tensor]:
        return {"centre": self._centre}

    def _load_shared(self, state: Mapping[str, torch.Tensor], *, is_same: bool) -> None:
        self._centre = state["centre"].clone()

    def _average_weights(self, ranks: Iterable[torch.Tensor]) -> torch.Tensor:
        return self._centre
