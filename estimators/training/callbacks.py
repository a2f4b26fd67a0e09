"""Callbacks: code of the user's at fixed points of a training, shown the state.

They run on every rank, each rank with its own copy, so what a callback collects stays there; one
that writes or logs asks for `state.rank == 0`. A callback that raises ends the training with its
name. None of them is called per batch unless it overrides `on_step_end`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ringspark.estimators.training.history import EpochRecord


@dataclass(kw_only=True)
class TrainingState:
    """What a callback sees.

    Attributes:
        rank: This rank's number; `size` of them train.
        module: The network, without wrappers. Changing its weights on one rank alone breaks training.
            Under sharding 'parameters' its parameters are DTensors, and `parameter.full_tensor()` on
            every rank puts one together.
        optimizer: Of this rank; its parameter groups hold the present learning rates. Under a sharding
            it holds this rank's part.
        epoch: Present epoch, from 1.
        step: Optimizer steps taken so far, of at most `num_steps`.
        history: One record per finished epoch; `history[-1]` is the present one in `on_epoch_end`.
        stop_reason: Why the training will end after this epoch, None where it goes on.
    """

    rank: int
    size: int
    module: nn.Module
    optimizer: torch.optim.Optimizer
    num_steps: int
    epoch: int = 0
    step: int = 0
    history: list[EpochRecord] = field(default_factory=list)
    stop_reason: str | None = None

    def stop(self, reason: str) -> None:
        """Ends the training after the present epoch, on all ranks; one rank's word is enough."""
        self.stop_reason = self.stop_reason or reason


class Callback:
    """The base of callbacks: override what you need. Instances must be picklable."""

    def on_train_start(self, state: TrainingState) -> None:
        """Before the first step."""

    def on_step_end(self, state: TrainingState) -> None:
        """After each optimizer step."""

    def on_epoch_end(self, state: TrainingState) -> None:
        """After validation; the epoch's record is `state.history[-1]`."""

    def on_train_end(self, state: TrainingState) -> None:
        """After the last epoch, also when the training was stopped."""


class Callbacks:
    """All callbacks of a rank, called in order."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = list(callbacks)
        self.has_step_end = any(type(c).on_step_end is not Callback.on_step_end for c in callbacks)

    def __len__(self) -> int:
        return len(self._callbacks)

    def call(self, event: str, state: TrainingState) -> None:
        """Calls the method `event` of each."""
        for callback in self._callbacks:
            getattr(callback, event)(state)
