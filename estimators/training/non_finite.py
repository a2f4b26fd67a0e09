"""Finds steps whose loss or gradient is not finite, equally on every rank, and handles them.

With 'stop', each rank checks its own losses. With 'skip' and 'rollback', no rank takes the step: a loss that
is not finite makes the summed gradients of all ranks not finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Action = Literal["skipped", "rolled back"]

# Number of steps that a result and a checkpoint report; all are logged.
MAX_REPORTED = 20

_NEVER = torch.iinfo(torch.int64).max


@dataclass(frozen=True, kw_only=True)
class NonFiniteStep:
    """A step with a loss or gradient that is not finite; `epoch` and the epoch's `step` count from 1."""

    epoch: int
    step: int
    ranks: tuple[int, ...]
    action: Action

    def __str__(self) -> str:
        where = f"epoch {self.epoch}, step {self.step}"
        if not self.ranks:
            return f"{where}: the summed gradients are not finite, {self.action}"
        ranks = ", ".join(str(rank) for rank in self.ranks)
        return f"{where}: the loss of rank {ranks} is not finite, {self.action}"


class RollBackError(Exception):
    """Leaves the training loop, so that the last checkpoint is loaded; the trainer always catches it."""

    def __init__(self, found: NonFiniteStep) -> None:
        super().__init__(str(found))
        self.found = found


class FirstBadLoss:
    """Keeps a rank's first step with a loss that is not finite. Only the property `step` waits for a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.is_immediate = device.type == "cpu"
        self._first = torch.full((), _NEVER, dtype=torch.int64, device=device)
        self._first_immediate = _NEVER

    def check(self, losses: torch.Tensor, step: int) -> None:
        """Checks the losses of one step, (num_losses,), without waiting for the device."""
        if not self.is_immediate:
            self._first = torch.minimum(self._first, torch.where(losses.isfinite().all(), _NEVER, step))
        elif not all(map(math.isfinite, losses.numpy().tolist())):  # torch's own tolist copies each number
            self._first_immediate = min(self._first_immediate, step)

    @property
    def step(self) -> int | None:
        """The first bad step, or None; waits for the device."""
        first = self._first_immediate if self.is_immediate else int(self._first)
        return None if first == _NEVER else first

    def reset(self) -> None:
        self._first.fill_(_NEVER)
        self._first_immediate = _NEVER


def raise_first_bad(epoch: int, first_bad: Sequence[int], advice: str) -> None:
    """Raises FloatingPointError for the earliest of `first_bad`: each rank's first non-finite step, or 0."""
    found = [(step, rank) for rank, step in enumerate(first_bad) if step]
    if found:
        step, rank = min(found)
        raise FloatingPointError(
            f"the training loss is not finite in epoch {epoch}, step {step} on rank {rank}; lower "
            f"learningRate, set maxGradNorm, scale the features, or set onNonFinite='skip'{advice}"
        )


def poison(loss: torch.Tensor) -> torch.Tensor:
    """Returns a loss whose gradients are NaN if it is not finite; does not wait for the device."""
    factor = torch.where(loss.detach().isfinite(), 1.0, math.nan)
    return loss * factor
