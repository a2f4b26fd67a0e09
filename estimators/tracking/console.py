"""Shows a training on the driver: a bar on a terminal or in a notebook, else plain lines.

training: epoch 2/5, step 1,200/3,000, 183,000 rows/s, 12 min left
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

from annotated_types import Gt
from tqdm.auto import tqdm

from ringspark.estimators.tracking.base import Listener, RunEnd, RunStart, Tracker, check_options
from ringspark.estimators.training.history import EpochRecord, TrainingProgress

PERIOD_SECONDS = 30.0


@dataclass(frozen=True)
class ConsoleTracker(Tracker):
    """Shows a bar over all steps and a line per epoch.

    Attributes:
        period_seconds: Seconds between two lines if standard error is no terminal.
    """

    name: ClassVar[str] = "console"
    period_seconds: Annotated[float, Gt(0)] = PERIOD_SECONDS

    def check(self) -> None:
        check_options(self)

    def start(self, run: RunStart) -> Listener:
        for change in run.changes:
            tqdm.write(f"training: {change}", file=sys.stderr)
        return _Bar() if _shows_bars() else PlainLines(period_seconds=self.period_seconds)


def _shows_bars() -> bool:
    """Whether a bar can change its line: on a terminal, or in a notebook, whose output is no terminal."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return sys.stderr.isatty() or hasattr(shell, "kernel")


class _Bar(Listener):
    def __init__(self) -> None:
        self._bar: Any = None
        self._steps = 0

    def progress(self, progress: TrainingProgress) -> None:
        if self._bar is None:
            self._bar = tqdm(total=progress.num_steps, unit="step", desc="training")
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


class PlainLines(Listener):
    """Writes a line per period and a line per epoch, by default to standard error.

    `write` takes one line without its end. `clock` is monotonic, in seconds.
    """

    def __init__(
        self,
        write: Callable[[str], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
        period_seconds: float = PERIOD_SECONDS,
    ) -> None:
        self._write = write or partial(print, file=sys.stderr, flush=True)
        self._clock = clock
        self._period = period_seconds
        # The training begins now; its first moments need no line.
        self._written_at = clock()
        # The first position since the ranks (re)started, so that a resumed training does not look fast.
        self._first: tuple[TrainingProgress, float] | None = None
        self._last_step = 0

    def progress(self, progress: TrainingProgress) -> None:
        now = self._clock()
        if self._first is None or progress.step < self._last_step:
            self._first = progress, now
        self._last_step = progress.step
        if now - self._written_at >= self._period:
            self._written_at = now
            first, seen_at = self._first
            steps, left = progress.step - first.step, max(0, progress.num_steps - progress.step)
            self._write(progress_line(progress, (now - seen_at) / steps * left if steps > 0 else None))

    def epoch(self, record: EpochRecord) -> None:
        self._write(epoch_line(record))


def progress_line(progress: TrainingProgress, seconds_left: float | None) -> str:
    parts = [f"epoch {progress.epoch}/{progress.epochs}", f"step {progress.step:,}/{progress.num_steps:,}"]
    if progress.seconds > 0:
        parts.append(f"{progress.rows / progress.seconds:,.0f} rows/s")
    if seconds_left is not None:
        parts.append(f"{duration(seconds_left)} left")
    return f"training: {', '.join(parts)}"


def epoch_line(record: EpochRecord) -> str:
    parts = [] if record.train_loss is None else [f"loss {record.train_loss:.4f}"]
    if record.validation_loss is not None:
        parts.append(f"validation loss {record.validation_loss:.4f}")
    parts.append(f"{record.seconds:.1f} s")
    return f"epoch {record.epoch}: {', '.join(parts)}"


def duration(seconds: float) -> str:
    """Returns seconds in at most two units: "40 s", "12 min", "3 h 5 min", "2 d 4 h"."""
    if int(seconds + 0.5) < 60:
        return f"{int(seconds + 0.5)} s"
    hours, minutes = divmod(int(seconds / 60 + 0.5), 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h" if hours else f"{days} d"
    if hours:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    return f"{minutes} min"
