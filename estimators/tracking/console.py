"""Shows a training on the driver: a bar on a terminal, plain lines where there is none."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, ClassVar

from tqdm.auto import tqdm

from ringspark.estimators.tracking.base import Listener, RunEnd, RunStart, Tracker
from ringspark.estimators.tracking.plain_lines import PERIOD_SECONDS, PlainLines, epoch_line
from ringspark.estimators.training.history import EpochRecord, TrainingProgress


@dataclass(frozen=True)
class ConsoleTracker(Tracker):
    """Shows a bar over all steps and a line per epoch.

    Attributes:
        period_seconds: Seconds between two lines of the position where standard error is no terminal, as
            under spark-submit, in a job of Databricks or a scheduler's.
    """

    name: ClassVar[str] = "console"
    period_seconds: float = PERIOD_SECONDS

    def check(self) -> None:
        seconds = self.period_seconds
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            raise ValueError(
                f"tracking: period_seconds of 'console' must be a number above 0, got {seconds!r}"
            )

    def start(self, run: RunStart) -> Listener:
        if sys.stderr.isatty():
            return _Bar()
        return _Lines(self.period_seconds)


class _Lines(Listener):
    def __init__(self, period_seconds: float) -> None:
        self._lines = PlainLines(period_seconds=period_seconds)

    def progress(self, progress: TrainingProgress) -> None:
        self._lines.progress(progress)

    def epoch(self, record: EpochRecord) -> None:
        self._lines.epoch(record)


class _Bar(Listener):
    def __init__(self) -> None:
        self._bar: Any = None
        self._steps = 0

    def progress(self, progress: TrainingProgress) -> None:
        if self._bar is None:
            self._bar = tqdm(total=progress.num_steps, unit="step", desc="training", disable=None)
        self._show(progress.step)
        rate = progress.rows / progress.seconds if progress.seconds else 0.0
        self._bar.set_postfix_str(f"epoch {progress.epoch}/{progress.epochs}, {rate:,.0f} rows/s")

    def epoch(self, record: EpochRecord) -> None:
        self._steps += record.steps
        tqdm.write(epoch_line(record))

    def end(self, end: RunEnd) -> None:
        if self._bar is not None:
            if end.status == "finished":
                self._show(self._steps)
            self._bar.close()

    def _show(self, step: int) -> None:
        self._bar.update(max(step - self._bar.n, 0))
