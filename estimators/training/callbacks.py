"""Callbacks: user code that runs at fixed points of a training and sees its state.

Every rank runs its own copy. An exception in a callback ends the training.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ringspark.estimators.training.history import EpochRecord


@dataclass(kw_only=True)
class TrainingState:
    """The state of a training that a callback sees.

    Attributes:
        rank: This rank's number, from 0.
        size: Number of ranks that train.
        module: The network, without wrappers. Change its weights on all ranks or on none. With
            sync=Zero(stage=3) the parameters are DTensors; `parameter.full_tensor()`, called on every rank,
            returns a whole tensor. With parallelism 'pipeline' the module holds this rank's stages and cannot
            be called. Each step overwrites the gradients, so clone a gradient to keep it.
        optimizer: This rank's optimizer; with sharding, of its shard. Its groups hold the learning rates.
        num_steps: Number of optimizer steps of the whole training.
        epoch: Current epoch, from 1.
        step: Number of optimizer steps taken, at most `num_steps`.
        history: One record per finished epoch; in `on_epoch_end` the last record is of the current epoch.
        stop_reason: Why the training will end after this epoch; None if it continues.
        averaged: Returns a context in which `module` holds the weights that are validated and saved; with
            `emaDecay`, these are the averaged weights. Every rank must enter the context.
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
    averaged: Callable[[], AbstractContextManager[None]] = nullcontext
    _logged: dict[str, list[float]] = field(default_factory=dict)

    def log(self, name: str, value: float) -> None:
        """Logs a value of this rank. Raises ValueError if it is not finite.

        The mean of the epoch's values is the metric `<name>_rank<rank>` of the epoch, in the history and in
        every tracker. Values logged in `on_epoch_end` belong to the next epoch. If a training resumes with
        another number of ranks within an epoch, the mean is of the values after the resume.
        """
        if not math.isfinite(value):
            raise ValueError(f"a callback logged {name}={value}; log finite numbers only")
        total = self._logged.setdefault(name, [0.0, 0])  # the sum of the values, and their number
        total[0] += float(value)
        total[1] += 1

    def take_logged(self) -> dict[str, float]:
        """Returns the means of the values logged since the last call."""
        means = {f"{name}_rank{self.rank}": total / count for name, (total, count) in self._logged.items()}
        self._logged.clear()
        return means

    def stop(self, reason: str) -> None:
        """Ends the training on all ranks after the current epoch. It is enough that one rank calls it."""
        self.stop_reason = self.stop_reason or reason


class Callback:
    """The base class of callbacks: override what you need. Instances must be picklable."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of this callback on this rank, as JSON values, for the checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state that `state_dict` returned on this rank.

        If the number of ranks has changed, it is the state of rank 0. Called after `on_train_start`. JSON has
        turned tuples into lists.
        """

    def on_train_start(self, state: TrainingState) -> None:
        """Called before the first step; a resumed training has already taken `state.step` steps."""

    def on_step_end(self, state: TrainingState) -> None:
        """Called after each optimizer step."""

    def on_epoch_end(self, state: TrainingState) -> None:
        """Called after validation; the epoch's record is `state.history[-1]`."""

    def on_train_end(self, state: TrainingState) -> None:
        """Called after the last epoch, even if the training was stopped."""


class Callbacks:
    """Calls `callbacks` in order, then the callback `stateless`. Checkpoints do not keep its state."""

    def __init__(self, callbacks: Sequence[Callback], stateless: Callback | None = None) -> None:
        self._callbacks = list(callbacks)
        self._all = [*callbacks, *([] if stateless is None else [stateless])]
        self.has_step_end = any(type(c).on_step_end is not Callback.on_step_end for c in callbacks)

    def __len__(self) -> int:
        return len(self._all)

    def call(self, event: str, state: TrainingState) -> None:
        for callback in self._all:
            getattr(callback, event)(state)

    def state_dicts(self) -> list[dict[str, Any]]:
        return [_copy_state(callback) for callback in self._callbacks]

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        if len(states) != len(self._callbacks):
            raise ValueError(
                f"the checkpoint was written by a training with {len(states)} callbacks, this one has "
                f"{len(self._callbacks)}; give the same callbacks, or set runUri to a new folder"
            )
        for callback, state in zip(self._callbacks, states, strict=True):
            callback.load_state_dict(state)


def _copy_state(callback: Callback) -> dict[str, Any]:
    state = callback.state_dict()
    try:
        # A copy, because the callback may change its state while the checkpoint is written.
        copied: dict[str, Any] = json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"callback {type(callback).__name__} must return JSON values from state_dict, got "
            f"{state!r:.200} ({error}); return numbers, texts, lists and dicts"
        ) from error
    return copied
