"""Callbacks that make a training fail once, so that it restarts from a checkpoint."""

import os
import signal
from pathlib import Path

from ringspark.estimators.training.callbacks import Callback, TrainingState


class Fails(Callback):
    """Fails or kills the last rank after step `step`, unless the file `mark` exists."""

    def __init__(self, mark: Path, step: int = 7, *, is_killed: bool = False) -> None:
        self._mark, self._step, self._is_killed = mark, step, is_killed

    def on_step_end(self, state: TrainingState) -> None:
        if state.step == self._step and state.rank == state.size - 1 and not self._mark.exists():
            self._mark.touch()
            if self._is_killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError(f"step {self._step}")


class Dies(Callback):
    """Kills the process of a rank after step `step`, without any cleanup, unless the file `mark` exists."""

    def __init__(self, mark: Path, step: int, rank: int = 0) -> None:
        self._mark, self._step, self._rank = mark, step, rank

    def on_step_end(self, state: TrainingState) -> None:
        if (state.rank, state.step) == (self._rank, self._step) and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
