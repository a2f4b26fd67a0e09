"""What a fitted model knows about its training."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from ringspark.estimators.training.history import EpochRecord
from ringspark.estimators.training.worker import TrainResult


@dataclass(frozen=True, kw_only=True)
class TrainingSummary:
    """Facts of one training.

    Attributes:
        epochs: One record per epoch, in order.
        rows: Rows seen, over all epochs and workers.
        steps: Optimizer steps.
        seconds: Wall time of the training on rank 0, without the launch of the gang.
        run_uri: The run directory.
    """

    epochs: tuple[EpochRecord, ...]
    rows: int
    steps: int
    seconds: float
    run_uri: str

    @property
    def history(self) -> pd.DataFrame:
        """One row per epoch: losses, learning rate, rows, steps, seconds."""
        return pd.DataFrame([asdict(record) for record in self.epochs])

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.seconds if self.seconds else 0.0

    @classmethod
    def of(cls, result: TrainResult) -> TrainingSummary:
        return cls(
            epochs=result.history,
            rows=result.rows,
            steps=result.steps,
            seconds=result.seconds,
            run_uri=result.run_uri,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TrainingSummary:
        epochs = tuple(EpochRecord(**record) for record in values["epochs"])
        return cls(**{**values, "epochs": epochs})
