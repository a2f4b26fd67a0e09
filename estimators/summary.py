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
        steps: Optimizer steps, `skipped_steps` among them.
        seconds: Wall time of the training on rank 0, without the launch of the gang.
        bytes_sent: What rank 0 sent to the others, counted as `Collective.bytes_sent` says.
        model_epoch: The epoch whose weights the model has.
        stop_reason: Why the training ended before its last epoch; None where it did not.
        run_uri: The run directory.
    """

    epochs: tuple[EpochRecord, ...]
    rows: int
    steps: int
    seconds: float
    bytes_sent: int = 0
    model_epoch: int = 0
    stop_reason: str | None = None
    run_uri: str

    @property
    def history(self) -> pd.DataFrame:
        """One row per epoch: losses, metrics, learning rate, rows, steps, skipped steps, seconds."""
        return pd.DataFrame([record.row() for record in self.epochs])

    @property
    def skipped_steps(self) -> int:
        """Steps that changed no weights, because their gradients overflowed; of precision "fp16" only."""
        return sum(record.skipped_steps for record in self.epochs)

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
            bytes_sent=result.bytes_sent,
            model_epoch=result.checkpoint_epoch,
            stop_reason=result.stop_reason,
            run_uri=result.run_uri,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TrainingSummary:
        epochs = tuple(EpochRecord(**record) for record in values["epochs"])
        return cls(**{**values, "epochs": epochs})
