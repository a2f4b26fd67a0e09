"""Chooses members of an ensemble, such as `TabPack`, by their errors on held-out rows after each epoch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn import functional

from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.settings.config import TrainConfig

IGNORED = -100
"""Class of rows that torch's cross entropy leaves out."""


@runtime_checkable
class Pack(Protocol):
    """A network that is an ensemble of small networks, its members; see `TabPack`."""

    center: float
    scale: float
    shares: torch.Tensor

    def candidates(self, *inputs: torch.Tensor) -> torch.Tensor: ...

    def choose_members(self, products: torch.Tensor) -> None: ...


class MemberChoice:
    """Compares an ensemble's members by squared errors of values, or of class probabilities (Brier)."""

    def __init__(self, network: Pack, mesh: RankMesh, task: str) -> None:
        self._network, self._mesh, self._is_classes = network, mesh, task == "classification"

    @classmethod
    def of(cls, network: nn.Module, config: TrainConfig, mesh: RankMesh) -> MemberChoice | None:
        """Returns a `MemberChoice` for an ensemble with an equal replica on every rank, else None."""
        is_whole = not config.cuts_network and config.sync.sharding == "none" and config.is_in_step
        return cls(network, mesh, config.task) if isinstance(network, Pack) and is_whole else None

    def choose(self, batches: Iterable[Batch]) -> None:
        """Chooses the same members on all ranks. Runs on every rank, with the rank's held-out rows."""
        members, device = len(self._network.shares), self._network.shares.device
        # A rank without rows takes part, too.
        sums = torch.zeros(2 * members, 2 * members, dtype=torch.float64, device=device)
        for batch in batches:
            if not batch.num_rows:
                continue
            found = self._network.candidates(*batch.inputs).double()
            label = batch.labels[0].reshape(len(batch.labels[0]), -1)
            errors = found - self._targets(label, found.shape[2])
            weight = torch.ones_like(label[:, 0]) if batch.weight is None else batch.weight
            if self._is_classes:
                weight = weight * (label[:, 0] != IGNORED)
            sums += torch.einsum("cbo,dbo->cd", errors * weight.double()[None, :, None], errors)
        self._network.choose_members(self._mesh.data.all_reduce(sums))

    def _targets(self, label: torch.Tensor, width: int) -> torch.Tensor:
        """Returns labels (batch, 1) as (batch, width): one-hot, or standardized values."""
        if self._is_classes:
            return functional.one_hot(label[:, 0].long().clamp_min(0), width).double()
        return (label.double() - self._network.center) / self._network.scale
