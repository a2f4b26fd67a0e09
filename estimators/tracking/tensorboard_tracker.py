"""Writes event files for TensorBoard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ringspark.estimators.tracking.base import Tracker


@dataclass(frozen=True)
class TensorBoardTracker(Tracker):
    """Logs one run a training."""

    name: ClassVar[str] = "tensorboard"
