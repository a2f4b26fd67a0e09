"""A callback of functions, so that a test need not define a class."""

from collections.abc import Callable
from typing import Any

import torch

from ringspark.estimators.training.callbacks import Callback, TrainingState


@torch.no_grad()
def add_to_weights(state: TrainingState, number: float) -> None:
    for parameter in state.module.parameters():
        parameter += number


class Acts(Callback):
    """Calls functions of the state by the names of events, as in `Acts(step_end=function)`."""

    def __init__(self, **functions: Callable[[TrainingState], Any]) -> None:
        self._functions = functions

    def on_train_start(self, state: TrainingState) -> None:
        self._act("train_start", state)

    def on_step_end(self, state: TrainingState) -> None:
        self._act("step_end", state)

    def on_epoch_end(self, state: TrainingState) -> None:
        self._act("epoch_end", state)

    def _act(self, event: str, state: TrainingState) -> None:
        if event in self._functions:
            self._functions[event](state)
