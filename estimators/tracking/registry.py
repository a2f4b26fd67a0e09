"""The trackers by name; each is imported on first use, because MLflow alone takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from typing import Any

from ringspark.estimators.lazy_imports import LazyRegistry
from ringspark.estimators.names import nearest
from ringspark.estimators.tracking.base import Listener, RunEnd, RunStart, Tracker
from ringspark.estimators.training.history import EpochRecord, TrainingProgress
from ringspark.estimators.training.settings.observation import TRACKER_GROUP
from ringspark.estimators.training.step_log import StepRecord
from ringspark.pipelines.entry_points import load_entry_point

_FOLDER = "ringspark.estimators.tracking"

TRACKERS: LazyRegistry[type[Tracker]] = LazyRegistry(
    {
        "console": f"{_FOLDER}.console:ConsoleTracker",
        "jsonl": f"{_FOLDER}.jsonl:JsonLinesTracker",
        "mlflow": "ringspark.extras.tracking.mlflow_tracker:MlflowTracker",
        "tensorboard": "ringspark.extras.tracking.tensorboard_tracker:TensorBoardTracker",
    }
)


def make_trackers(given: Sequence[Any], shows_progress: bool) -> list[Tracker]:
    """Makes and checks the trackers for the Params `tracking` and `showProgress`."""
    trackers = [_make_tracker(entry) for entry in given]
    if shows_progress and not any(tracker.name == "console" for tracker in trackers):
        trackers.insert(0, TRACKERS["console"]())
    for tracker in trackers:
        check = getattr(tracker, "check", None)
        if check is not None:
            check()
    return trackers


def surroundings_of(given: Sequence[Any]) -> dict[str, str]:
    """Returns the `surroundings` of all trackers; ignores invalid ones, which `make_trackers` reports."""
    found: dict[str, str] = {}
    for entry in given:
        with suppress(ValueError, TypeError):
            found |= getattr(_make_tracker(entry), "surroundings", dict)()
    return found


def _make_tracker(entry: Any) -> Tracker:
    if hasattr(entry, "start"):
        return entry  # type: ignore[no-any-return]
    if callable(entry):
        return FunctionTracker(entry)
    options = {"name": entry} if isinstance(entry, str) else dict(entry)
    name = options.pop("name")
    if name not in TRACKERS:
        kind = load_entry_point(TRACKER_GROUP, "tracking", name, TRACKERS, ("start",))
        return kind(**options)  # type: ignore[no-any-return]
    kind = TRACKERS[name]
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    if unknown := sorted(options.keys() - set(known)):
        hint = nearest(unknown[0], known) or f"; it takes {', '.join(known) or 'none'}"
        raise ValueError(f"tracking: {name!r} has no option {unknown[0]!r}{hint}")
    return kind(**options)


class FunctionTracker(Tracker):
    """Calls `function(event)` on the driver, with a dict of "event", "run" (the stage's uid) and more keys.

    The event "start" adds settings, data, run_uri and resumed. "progress", "step" and "epoch" add the fields
    of their records. "end" adds status, error and model.
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
        self._call("progress", asdict(progress))

    def steps(self, records: Sequence[StepRecord]) -> None:
        for record in records:
            self._call("step", asdict(record))

    def epoch(self, record: EpochRecord) -> None:
        self._call("epoch", asdict(record))

    def end(self, end: RunEnd) -> None:
        self._call("end", {"status": end.status, "error": end.error, "model": end.model})

    def _call(self, event: str, values: dict[str, Any]) -> None:
        self._function({"event": event, "run": self._run, **values})
