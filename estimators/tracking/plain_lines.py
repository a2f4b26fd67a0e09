"""Shows a training as plain lines, for logs without a terminal: spark-submit, Databricks, a scheduler's.

    training: epoch 2/5, step 1,200/3,000, 183,000 rows/s, 12 min left

There is one such line a period, and one line a finished epoch. The time left is reckoned from the steps that
were seen being taken, so that a resumed training is not taken for a fast one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from ringspark.estimators.training.history import EpochRecord, TrainingProgress

PERIOD_SECONDS = 30.0


def progress_line(progress: TrainingProgress, seconds_left: float | None) -> str:
    """Returns the line of a position; without the time left if that is unknown (None)."""
    parts = [
        f"epoch {progress.epoch}/{progress.epochs}",
        f"step {progress.step:,}/{progress.num_steps:,}",
    ]
    if progress.seconds > 0:
        parts.append(f"{progress.rows / progress.seconds:,.0f} rows/s")
    if seconds_left is not None:
        parts.append(f"{duration(seconds_left)} left")
    return f"training: {', '.join(parts)}"


def epoch_line(record: EpochRecord) -> str:
    """Returns the line of a finished epoch."""
    parts = [f"loss {record.train_loss:.4f}"]
    if record.validation_loss is not None:
        parts.append(f"validation loss {record.validation_loss:.4f}")
    parts.append(f"{record.seconds:.1f} s")
    return f"epoch {record.epoch}: {', '.join(parts)}"


def duration(seconds: float) -> str:
    """Returns seconds in words of at most two units: "40 s", "12 min", "3 h 5 min", "2 d 4 h"."""
    whole = int(seconds + 0.5)
    if whole < 60:
        return f"{whole} s"
    minutes = int(seconds / 60 + 0.5)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


class PlainLines:
    """Writes a line a period and a line an epoch.

    Args:
        write: Takes one line without its end; by default it goes to standard error.
        clock: Seconds by a clock that never goes back.
    """

    def __init__(
        self,
        write: Callable[[str], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
        period_seconds: float = PERIOD_SECONDS,
    ) -> None:
        self._write = write or _to_stderr
        self._clock = clock
        self._period = period_seconds
        # The training begins now; a line of its first moments would say nothing.
        self._written_at = clock()
        # The first position since the ranks (re)started, and when it was seen.
        self._first: tuple[TrainingProgress, float] | None = None
        self._last_step = 0

    def progress(self, progress: TrainingProgress) -> None:
        """Takes the present position, as often as there is one; writes it if its time has come."""
        now = self._clock()
        if self._first is None or progress.step < self._last_step:
            self._first = progress, now
        self._last_step = progress.step
        if now - self._written_at >= self._period:
            self._written_at = now
            self._write(progress_line(progress, self._seconds_left(progress, now)))

    def epoch(self, record: EpochRecord) -> None:
        """Writes the line of a finished epoch."""
        self._write(epoch_line(record))

    def _seconds_left(self, progress: TrainingProgress, now: float) -> float | None:
        assert self._first is not None
        first, seen_at = self._first
        steps = progress.step - first.step
        if steps <= 0:
            return None
        return (now - seen_at) / steps * max(0, progress.num_steps - progress.step)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
