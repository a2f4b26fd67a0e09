"""Shows a training on the driver's terminal: one bar over all steps and one line per finished epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from tqdm.auto import tqdm

from ringspark.estimators.tracking.base import Listener, RunEnd, RunStart, Tracker
from ringspark.estimators.training.history import EpochRecord, Progress


@dataclass(frozen=True)
class ConsoleTracker(Tracker):
    """Shows a bar and a line per epoch."""

    name: ClassVar[str] = "console"

    def start(self, run: RunStart) -> Listener:
        return _Bar()


class _Bar(Listener):
    def __init__(self) -> None:
        self._bar: Any = None
        self._steps = 0

    def progress(self, progress: Progress) -> None:
        if self._bar is None:
            self._bar = tqdm(total=progress.num_steps, unit="step", desc="training", disable=None)
        self._show(progress.step)
        rate = progress.rows / progress.seconds if progress.seconds else 0.0
        self._bar.set_postfix_str(f"epoch {progress.epoch}/{progress.epochs}, {rate:,.0f} rows/s")

    def epoch(self, record: EpochRecord) -> None:
        self._steps += record.steps
        validation = ""
        if record.validation_loss is not None:
            validation = f", validation loss {record.validation_loss:.4f}"
        tqdm.write(f"epoch {record.epoch}: loss {record.train_loss:.4f}{validation}, {record.seconds:.1f} s")

    def end(self, end: RunEnd) -> None:
        if self._bar is not None:
            if end.status == "finished":
                self._show(self._steps)
            self._bar.close()

    def _show(self, step: int) -> None:
        self._bar.update(max(step - self._bar.n, 0))
