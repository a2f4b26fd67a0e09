"""Gathers the rows of all ranks, with the gradient of a loss that is summed over the ranks.

Each rank uses all rows in its own share of the loss. So the gradient of a row is the sum over the ranks, and
it returns to the rank that has the row. Both directions are linear, so second derivatives work too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.base import peer_errors
from ringspark.extras.model_parallel.communication import LinearOperation
from ringspark.pipelines.epoch_plan import EpochPlan


@dataclass(frozen=True)
class StepRows:
    """The rows of one step on all ranks.

    Attributes:
        step: Step within the epoch, from 0.
    """

    plan: EpochPlan
    step: int
    collective: Collective
    device: torch.device

    @cached_property
    def counts(self) -> list[int]:
        """Number of rows of each rank."""
        return [self.plan.shard_rows(self.step, rank) for rank in range(self.collective.size)]

    @cached_property
    def total(self) -> int:
        return self.plan.global_rows(self.step)

    @cached_property
    def own(self) -> torch.Tensor:
        """Positions of this rank's rows among the rows of all ranks, ascending."""
        return torch.from_numpy(self.plan.shard_positions(self.step, self.collective.rank)).to(self.device)

    @cached_property
    def _order(self) -> torch.Tensor:
        """Positions of the rows of all ranks, rank by rank."""
        each = [self.plan.shard_positions(self.step, rank) for rank in range(self.collective.size)]
        return torch.cat([torch.from_numpy(positions) for positions in each]).to(self.device)

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the rows of all ranks, in the same order for any number of ranks. Runs on every rank."""
        if self.collective.size == 1:
            return rows
        gathered: torch.Tensor = LinearOperation.apply(rows, self._all_gather, self._scatter)  # type: ignore[no-untyped-call]
        return gathered

    def _scatter(self, rows: torch.Tensor) -> torch.Tensor:
        """Sums all ranks' (total, ...) tensors; returns the sum's rows of this rank. Runs on every rank."""
        own: torch.Tensor = LinearOperation.apply(rows, self._reduce_scatter, self.gather)  # type: ignore[no-untyped-call]
        return own

    def _all_gather(self, rows: torch.Tensor) -> torch.Tensor:
        width = rows.shape[1:].numel()
        with peer_errors("gathering rows"):
            shards = self.collective.all_gather(rows.contiguous().view(-1), self._lengths(width))
        result = rows.new_empty(self.total, *rows.shape[1:])
        result[self._order] = torch.cat(shards).view(result.shape)
        return result

    def _reduce_scatter(self, rows: torch.Tensor) -> torch.Tensor:
        width = rows.shape[1:].numel()
        flat = rows[self._order].view(-1)
        with peer_errors("summing the gradients of gathered rows"):
            own = self.collective.start_reduce_scatter(flat, self._lengths(width))()
        return own.view(self.counts[self.collective.rank], *rows.shape[1:])

    def _lengths(self, width: int) -> Sequence[int]:
        return [count * width for count in self.counts]
