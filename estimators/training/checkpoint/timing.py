"""Decides when a checkpoint is due, by steps, epochs and seconds, alike on all ranks.

Every rank counts steps and epochs. Only rank 0 reads the clock: a rare broadcast says that a checkpoint is
due, or after how many steps to look again. So most steps cost only a comparison of numbers. Ranks that take
their steps at their own pace look at it only after an epoch, where they meet anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.settings.config import TrainConfig

# Seconds between two looks at the clock if the checkpoint is far away.
_LOOK_SECONDS = 10.0


class Due:
    """Decides on every rank, after every step and every epoch.

    Attributes:
        last_step: Number of steps before the last checkpoint.
    """

    def __init__(
        self, config: TrainConfig, mesh: RankMesh, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._steps = config.checkpoint_every_steps
        self._epochs = config.checkpoint_every_epochs
        self._seconds = config.checkpoint_every_seconds
        self._in_step = config.is_in_step
        self._mesh = mesh
        self._clock = clock
        self.is_asked = bool(self._steps or self._epochs or self._seconds or config.pause_after)
        self.written(0)

    def written(self, step: int) -> None:
        """Notes that a checkpoint was taken after `step` steps, or that the training starts there."""
        self.last_step = step
        self._last = self._looked = self._clock()
        self._looked_at = step
        self._look_at = step + 1
        self._stride = 1

    def after_step(self, step: int) -> bool:
        """Returns whether a checkpoint is due after `step` steps of the training. Runs on every rank."""
        if self._steps and step % self._steps == 0:
            return True
        return bool(self._seconds) and self._in_step and step >= self._look_at and self._look(step)

    def after_epoch(self, epoch: int) -> bool:
        """Returns whether a checkpoint is due after `epoch` epochs. Runs on every rank."""
        if self._epochs and epoch % self._epochs == 0:
            return True
        return bool(self._seconds) and not self._in_step and self._is_late()

    def _is_late(self) -> bool:
        answer = torch.tensor([int(self._clock() - self._last >= self._seconds)])
        self._mesh.world.broadcast([answer])
        return bool(answer)

    def _look(self, step: int) -> bool:
        answer = torch.zeros(1, dtype=torch.int64)
        if self._mesh.writes:
            answer[0] = self._steps_to_go(step)
        self._mesh.world.broadcast([answer])
        self._look_at = step + int(answer)
        return not int(answer)

    def _steps_to_go(self, step: int) -> int:
        """Returns the number of steps until the next look at the clock; 0 if a checkpoint is due now."""
        now = self._clock()
        left = self._seconds - (now - self._last)
        if left <= 0:
            return 0
        pace = max(1e-9, (now - self._looked) / max(1, step - self._looked_at))
        self._looked, self._looked_at = now, step
        # Doubled at most, because the first steps say little about the pace of the others.
        self._stride = max(1, min(2 * self._stride, int(0.9 * min(left, _LOOK_SECONDS) / pace)))
        return self._stride
