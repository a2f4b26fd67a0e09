"""Tells a function of the user's own of a training, one event at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from ringspark.estimators.tracking.base import Listener, RunEnd, RunStart, Tracker
from ringspark.estimators.training.history import EpochRecord, TrainingProgress
from ringspark.estimators.training.step_log import StepRecord


class FunctionTracker(Tracker):
    """Calls `function(event)` on the driver, with a dict of "event", "run" (the stage's uid) and more.

    "start": settings, data, run_uri, resumed; "progress", "step" and "epoch": their records' fields; "end":
    status, error, model.
    """

    def __init__(self, function: Callable[[dict[str, Any]], Any]) -> None:
        self.function = function

    def start(self, run: RunStart) -> Listener:
        facts = {"run_uri": run.run_uri, "settings": dict(run.settings), "data": dict(run.data)}
        self.function({"event": "start", "run": run.name, **facts, "resumed": run.resumed})
        return _Caller(self.function, run.name)


class _Caller(Listener):
    def __init__(self, function: Callable[[dict[str, Any]], Any], run: str) -> None:
        self._function, self._run = function, run

    def progress(self, progress: TrainingProgress) -> None:
        self._tell("progress", asdict(progress))

    def steps(self, records: Sequence[StepRecord]) -> None:
        for record in records:
            self._tell("step", asdict(record))

    def epoch(self, record: EpochRecord) -> None:
        self._tell("epoch", asdict(record))

    def end(self, end: RunEnd) -> None:
        self._tell("end", {"status": end.status, "error": end.error, "model": end.model})

    def _tell(self, event: str, values: dict[str, Any]) -> None:
        self._function({"event": event, "run": self._run, **values})
