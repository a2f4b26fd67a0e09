"""Writes and reads the files of a run directory that show the progress of a training.

`history.json` has one entry per finished epoch, `progress.json` the present position.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any

from ringspark.estimators import run_layout
from ringspark.estimators.training.observation.background_file import BackgroundFile
from ringspark.pipelines import storage
from ringspark.pipelines.typed_json import JsonText, fit, parse

_log = logging.getLogger(__name__)

# Seconds between two writes of the position; the store may be slow.
PROGRESS_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class EpochCost:
    """The cost of an epoch over all ranks; None if unknown.

    Attributes:
        training_seconds: Time without the validation.
        flops_utilization: Operations per second, as a share of the devices' peak.
        energy_joules: Energy of the ranks' GPUs, or of their hosts if they train on CPUs.
        communication_seconds: Time with a collective operation in progress, mean over the ranks.
        communication_hidden: Share of that time in which the rank also computed.
    """

    training_seconds: float
    bytes_sent: int | None
    flops: int | None
    flops_utilization: float | None
    energy_joules: float | None
    communication_seconds: float | None = None
    communication_hidden: float | None = None

    def row(self, rows: int) -> dict[str, Any]:
        seconds = self.training_seconds
        return asdict(self) | {
            "rows_per_second": rows / seconds if seconds > 0 else None,
            "flops_per_second": self.flops / seconds if self.flops is not None and seconds > 0 else None,
        }


@dataclass(frozen=True, kw_only=True)
class GradientNoise:
    """Trace of the covariance of a row's gradient, and squared norm of the mean gradient."""

    variance: float
    square: float

    @property
    def scale(self) -> float | None:
        """The simple noise scale in rows, McCandlish et al. 2018; None if noise hides the gradient."""
        return self.variance / self.square if self.square > 0 and self.variance > 0 else None

    def row(self) -> dict[str, Any]:
        return {"noise_scale": self.scale, "gradient_variance": self.variance, "gradient_square": self.square}


@dataclass(frozen=True, kw_only=True)
class EpochRecord:
    """One finished epoch; losses are means per row (per unit of weight) over all ranks.

    `skipped_steps` counts steps that changed no weights. `train_loss` leaves out steps with a loss that was
    not finite, and is None if the training hides its rows.
    """

    epoch: int
    steps: int
    rows: int
    seconds: float
    learning_rate: float
    train_loss: float | None
    validation_loss: float | None
    skipped_steps: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    """`train_...` and `validation_...`: the metrics, and each label's loss if there are several."""
    cost: EpochCost | None = None
    noise: GradientNoise | None = None
    """Gradient noise of the epoch; None if noiseScale is not set, or no step was measured."""
    batch_size: int | None = None
    """Rows of a full step in this epoch."""

    def value(self, name: str) -> float:
        """Returns the loss or metric called `name`; NaN if the epoch has none."""
        losses = {"train_loss": self.train_loss, "validation_loss": self.validation_loss}
        value = (losses | self.metrics).get(name)
        return math.nan if value is None else value

    def row(self) -> dict[str, Any]:
        values: dict[str, Any] = asdict(self)
        metrics: dict[str, float] = values.pop("metrics")
        del values["cost"], values["noise"]
        return values | self._columns() | metrics

    def numbers(self) -> dict[str, float]:
        """Returns the losses, learning rate, costs and metrics that are known."""
        losses = {"train_loss": self.train_loss, "validation_loss": self.validation_loss}
        values = losses | {"learning_rate": self.learning_rate} | self._columns() | self.metrics
        return {name: float(value) for name, value in values.items() if value is not None}

    def _columns(self) -> dict[str, Any]:
        cost = {} if self.cost is None else self.cost.row(self.rows)
        return cost | ({} if self.noise is None else self.noise.row())


@dataclass(frozen=True, kw_only=True)
class SettingChange:
    """A setting that a resume changed, and the first epoch and step (from 1) with the new value."""

    setting: str
    before: Any
    now: Any
    epoch: int
    step: int
    note: str = ""

    def __str__(self) -> str:
        change = f"from epoch {self.epoch}, step {self.step} on: {self.setting} {self.before} -> {self.now}"
        return f"{change}; {self.note}" if self.note else change


@dataclass(frozen=True, kw_only=True)
class TrainingProgress(JsonText):
    epoch: int
    epochs: int
    step: int
    num_steps: int
    rows: int
    seconds: float


class RunLog(AbstractContextManager["RunLog"]):
    """Writes the run directory on rank 0. A training does not fail if the store refuses these files."""

    def __init__(self, run_uri: str, writes: bool) -> None:
        self._uri = storage.join(run_uri, run_layout.HISTORY)
        self._writes = writes
        self._last_progress = 0.0
        self._progress = BackgroundFile(storage.join(run_uri, run_layout.PROGRESS), "position")
        self.history: list[EpochRecord] = []

    def __exit__(self, *_: object) -> None:
        # The folder may be removed after this.
        self._progress.close()

    @property
    def wants_progress(self) -> bool:
        is_old = time.monotonic() - self._last_progress >= PROGRESS_SECONDS
        return self._writes and is_old and not self._progress.is_busy

    def write_progress(self, progress: TrainingProgress) -> None:
        if self.wants_progress:
            self._last_progress = time.monotonic()
            text = progress.to_json().encode()
            self._progress.write(lambda: text)

    def add_epoch(self, record: EpochRecord) -> None:
        self.history.append(record)
        if self._writes:
            try:
                self._write()
            except OSError as error:
                _log.warning("the history was not written (%s); training continues without it", error)

    def restore(self, history: Sequence[EpochRecord]) -> None:
        """Continues after the epochs in `history`; drops later epochs, which a failed attempt recorded."""
        self.history[:] = history
        if self._writes and (history or storage.exists(self._uri)):
            self._write()

    def _write(self) -> None:
        storage.write_atomic(self._uri, json.dumps([asdict(r) for r in self.history]).encode())


def read_history(run_uri: str) -> list[EpochRecord]:
    """Returns the finished epochs; empty before the first."""
    uri = storage.join(run_uri, run_layout.HISTORY)
    return parse_history(storage.read_bytes(uri)) if storage.exists(uri) else []


def parse_history(text: bytes) -> list[EpochRecord]:
    # A loss that overflowed is stored as NaN.
    records: list[EpochRecord] = fit(list[EpochRecord], parse(text, allow_nan=True), run_layout.HISTORY)
    return records


def read_progress(run_uri: str) -> TrainingProgress | None:
    """Returns the present position, None before the first step."""
    uri = storage.join(run_uri, run_layout.PROGRESS)
    return TrainingProgress.from_json(storage.read_bytes(uri)) if storage.exists(uri) else None
