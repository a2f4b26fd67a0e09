"""The run directory's small files: what the training has done so far, for whoever watches.

`history.json` holds one entry per finished epoch, `progress.json` the present position. Rank 0
replaces them atomically, so a reader on any machine that sees the store can follow, also where
the driver cannot be reached.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from ringspark.estimators import run_layout
from ringspark.pipelines import storage
from ringspark.pipelines.typed_json import fit, parse, parse_object, record

_log = logging.getLogger(__name__)

# The store may be far away: at most this often.
PROGRESS_SECONDS = 0.5
# For what is being written when the training ends.
END_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class EpochRecord:
    """One finished epoch; losses are means per row (per unit of weight) over all ranks.

    `skipped_steps`, a part of `steps`, changed no weights: their gradients overflowed in fp16, or were not
    finite with onNonFinite 'skip'. Of their rows, those whose loss was not finite are left out of
    `train_loss`.
    """

    epoch: int
    steps: int
    rows: int
    seconds: float
    learning_rate: float
    train_loss: float
    validation_loss: float | None
    skipped_steps: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    """`train_...` and `validation_...`: the metrics asked for, each label's loss where there are several."""

    def value(self, name: str) -> float:
        """The loss or metric called `name`; not a number where the epoch has none."""
        losses = {"train_loss": self.train_loss, "validation_loss": self.validation_loss}
        value = (losses | self.metrics).get(name)
        return math.nan if value is None else value

    def row(self) -> dict[str, Any]:
        """The record as one flat row of a table."""
        values: dict[str, Any] = asdict(self)
        metrics: dict[str, float] = values.pop("metrics")
        return values | metrics


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The present position: `step` of `num_steps` optimizer steps over the whole training."""

    epoch: int
    epochs: int
    step: int
    num_steps: int
    rows: int
    seconds: float


class RunLog:
    """Rank 0's writer of the run directory; on the other ranks nothing is written. A context manager.

    All of it is for show: no training ends where the store does not take it, or waits for it to take the
    position. What a training goes on from is in its checkpoints, and its result has the history.
    """

    def __init__(self, run_uri: str, writes: bool) -> None:
        self._run_uri = run_uri
        self._writes = writes
        self._last_progress = 0.0
        self._showing: threading.Thread | None = None
        self.history: list[EpochRecord] = []

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        # The folder may be removed next.
        if self._showing is not None:
            self._showing.join(END_SECONDS)

    def progress(self, progress: Progress) -> None:
        now = time.monotonic()
        if not self._writes or now - self._last_progress < PROGRESS_SECONDS:
            return
        if self._showing is not None and self._showing.is_alive():
            return
        self._last_progress = now
        self._showing = threading.Thread(
            target=self._show, args=(progress,), name="ringspark-progress-file", daemon=True
        )
        self._showing.start()

    def _show(self, progress: Progress) -> None:
        with suppress(OSError):
            self._write(run_layout.PROGRESS, asdict(progress))

    def epoch(self, record: EpochRecord) -> None:
        self.history.append(record)
        if self._writes:
            try:
                self._write(run_layout.HISTORY, [asdict(r) for r in self.history])
            except OSError as error:
                _log.warning("the history was not written (%s); the training goes on without it", error)

    def restore(self, history: Sequence[EpochRecord]) -> None:
        """Goes on after these epochs: later ones of an attempt that was lost are forgotten."""
        self.history[:] = history
        if self._writes and (history or storage.exists(storage.join(self._run_uri, run_layout.HISTORY))):
            self._write(run_layout.HISTORY, [asdict(r) for r in self.history])

    def _write(self, name: str, value: object) -> None:
        storage.write_atomic(storage.join(self._run_uri, name), json.dumps(value).encode())


def read_history(run_uri: str) -> list[EpochRecord]:
    """The epochs finished so far; empty before the first.

    Raises:
        ValueError: The file is damaged.
    """
    uri = storage.join(run_uri, run_layout.HISTORY)
    if not storage.exists(uri):
        return []
    return parse_history(storage.read_bytes(uri))


def parse_history(text: bytes) -> list[EpochRecord]:
    """The epochs from the bytes of their file; ValueError where it is damaged."""
    # A loss that overflowed is NaN there.
    records: list[EpochRecord] = fit(list[EpochRecord], parse(text, allow_nan=True), run_layout.HISTORY)
    return records


def read_progress(run_uri: str) -> Progress | None:
    """The present position, None before the first step.

    Raises:
        ValueError: The file is damaged.
    """
    uri = storage.join(run_uri, run_layout.PROGRESS)
    if not storage.exists(uri):
        return None
    return record(Progress, parse_object(storage.read_bytes(uri)))
