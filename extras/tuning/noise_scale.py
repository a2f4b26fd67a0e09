"""Measures the gradient noise scale, the batch size above which more rows help little.

McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", appendix A. If rows' gradients have mean
G and covariance Sigma, the mean over b rows has E|g_b|^2 = |G|^2 + tr(Sigma) / b. Two batch sizes give both
unknowns: a rank's rows and all ranks' rows, or on one rank the first micro-batch and the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel.base import GradientSync, dense_values
from ringspark.estimators.parallel.data.gradient_buckets import norm_dtype
from ringspark.estimators.training.history import GradientNoise
from ringspark.models.generators import Tensors

# Weight of the earlier steps in the average, which spans about 100 steps.
DECAY = 0.99
_STATE = "noise"


class NoiseMeter:
    def __init__(self, sync: GradientSync, data: Collective) -> None:
        self._sync = sync
        self._data = data
        self._parameters = [p for group in sync.optimizer.param_groups for p in group["params"]]
        first = self._parameters[0]
        # Averages of tr(Sigma) and of |G|^2, separately, because a ratio of noisy numbers is biased; and the
        # total weight of the steps in them.
        self._means = torch.zeros(3, dtype=norm_dtype(first), device=first.device)
        self._small: tuple[torch.Tensor, int] | None = None  # squared norm and rows of the smaller batch
        self._step: torch.Tensor | None = None  # not kept yet

    def micro_batch(self, number: int, count: int, rows: int) -> None:
        """Reads the gradients after micro-batch `number` of `count`, from 1."""
        if self._data.size == 1 and number == 1 < count:
            self._small = self._square(), rows

    def solve(self, own_rows: int, global_rows: int, factor: float) -> None:
        """Computes the step's noise once the ranks have summed their gradients; `factor` scaled the loss."""
        if self._sync.local_square is not None:
            self._small = self._sync.local_square, own_rows
        small, self._small, self._step = self._small, None, None
        if small is None or not 0 < small[1] < global_rows:
            return  # all rows were on this rank, or none
        square, rows = small
        # The rank's gradient is its share of the mean over all rows.
        own = square * (global_rows / rows) ** 2 / factor**2
        whole = self._square() / factor**2
        variance = (own - whole) / (1 / rows - 1 / global_rows)
        mean = (global_rows * whole - rows * own) / (global_rows - rows)
        self._step = torch.stack([variance, mean, torch.ones_like(mean)]).to(self._means)

    def keep(self) -> None:
        """Adds the step to the averages, once the optimizer has taken it."""
        self._means *= DECAY
        if self._step is not None:
            self._means += (1 - DECAY) * self._step

    def take(self) -> GradientNoise | None:
        """Returns the averages over all ranks; None before the first step. Runs on every rank."""
        variance, square, weight = self._data.all_reduce(self._means.cpu()).tolist()
        return GradientNoise(variance=variance / weight, square=square / weight) if weight else None

    def state(self) -> Tensors:
        return {_STATE: self._means.cpu().clone()}

    def load(self, states: Sequence[Mapping[str, torch.Tensor]]) -> None:
        found = [state[_STATE] for state in states if _STATE in state]
        self._means.copy_(torch.stack(found).sum(0) if found else torch.zeros(3))

    @torch.no_grad()
    def _square(self) -> torch.Tensor:
        gradients = dense_values([p.grad for p in self._parameters if p.grad is not None])
        norms = torch.stack(torch._foreach_norm(gradients, 2.0, norm_dtype(self._parameters[0])))
        return norms.square().sum()
