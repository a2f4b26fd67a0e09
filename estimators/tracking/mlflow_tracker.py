"""Logs a training as one run of MLflow, from the driver only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ringspark.estimators.tracking.base import Tracker


@dataclass(frozen=True)
class MlflowTracker(Tracker):
    """Logs one run a training."""

    name: ClassVar[str] = "mlflow"
