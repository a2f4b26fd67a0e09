"""Callbacks: code of the user's at fixed points of a training, shown the state.

They run on every rank, each rank with its own copy, so what a callback collects stays there; one
that writes or logs asks for `state.rank == 0`. A callback that raises ends the training with its
name. None of them is called per batch unless it overrides `on_step_end`. What one must still know after a
restart it gives in `state_dict`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of this callback on this rank: values that JSON has."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes `state_dict`'s result over, when a training goes on; with other workers, that of rank 0.

        After `on_train_start`. Tuples come back as lists.
        """

    def on_train_start(self, state: TrainingState) -> None:
        """Before the first step; of a training that goes on, `state.step` were taken already."""

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

    def state_dicts(self) -> list[dict[str, Any]]:
        """The state of each, in order.

        Raises:
            ValueError: One has values that JSON lacks.
        """
        return [_checked(callback) for callback in self._callbacks]

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Takes the states over.

        Raises:
            ValueError: They are of other callbacks.
        """
        if len(states) != len(self._callbacks):
            raise ValueError(
                f"the checkpoint is of a training with {len(states)} callbacks, this one has "
                f"{len(self._callbacks)}; give the same callbacks, or runUri a folder of its own"
            )
        for callback, state in zip(self._callbacks, states, strict=True):
            callback.load_state_dict(state)


def _checked(callback: Callback) -> dict[str, Any]:
    state = callback.state_dict()
    try:
        # A copy: the callback goes on while the checkpoint is being written.
        copied: dict[str, Any] = json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"callback {type(callback).__name__} must return values that JSON has from state_dict, got "
            f"{state!r:.200} ({error}); return numbers, texts, lists and dicts"
        ) from error
    return copied
