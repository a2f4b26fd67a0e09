"""The trackers by name; each is imported when it is asked for, because MLflow alone takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any

from ringspark.estimators.names import nearest
from ringspark.estimators.tracking.base import Tracker
from ringspark.estimators.tracking.function_tracker import FunctionTracker
from ringspark.estimators.training.settings.observation import TRACKER_GROUP
from ringspark.pipelines.entry_points import load_entry_point


def _console() -> type[Tracker]:
    from ringspark.estimators.tracking.console import ConsoleTracker

    return ConsoleTracker


def _jsonl() -> type[Tracker]:
    from ringspark.estimators.tracking.jsonl import JsonLinesTracker

    return JsonLinesTracker


def _mlflow() -> type[Tracker]:
    from ringspark.estimators.tracking.mlflow_tracker import MlflowTracker

    return MlflowTracker


def _tensorboard() -> type[Tracker]:
    from ringspark.estimators.tracking.tensorboard_tracker import TensorBoardTracker

    return TensorBoardTracker


TRACKERS: dict[str, Callable[[], type[Tracker]]] = {
    "console": _console,
    "jsonl": _jsonl,
    "mlflow": _mlflow,
    "tensorboard": _tensorboard,
}


def make_trackers(given: Sequence[Any], shows_progress: bool) -> list[Tracker]:
    """Returns the trackers of `tracking` and `showProgress`, checked.

    Raises:
        ValueError: A tracker has no such option, or cannot work here; the message says why.
    """
    trackers = [_made(entry) for entry in given]
    if shows_progress and not any(tracker.name == "console" for tracker in trackers):
        trackers.insert(0, _console()())
    for tracker in trackers:
        check = getattr(tracker, "check", None)
        if check is not None:
            check()
    return trackers


def surroundings_of(given: Sequence[Any]) -> dict[str, str]:
    """Returns what the trackers of `tracking` need to know of the calling thread; see `Tracker`.

    A tracker that cannot be made has none: `make_trackers` tells the user of it.
    """
    found: dict[str, str] = {}
    for entry in given:
        with suppress(ValueError, TypeError):
            found |= getattr(_made(entry), "surroundings", dict)()
    return found


def _made(entry: Any) -> Tracker:
    if hasattr(entry, "start"):
        return entry  # type: ignore[no-any-return]
    if callable(entry):
        return FunctionTracker(entry)
    options = {"name": entry} if isinstance(entry, str) else dict(entry)
    name = options.pop("name")
    if name in TRACKERS:
        kind = TRACKERS[name]()
    else:
        kind = load_entry_point(TRACKER_GROUP, "tracking", name, TRACKERS, ("start",))
        return kind(**options)  # type: ignore[no-any-return]
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    if unknown := sorted(options.keys() - set(known)):
        hint = nearest(unknown[0], known) or f"; it takes {', '.join(known) or 'none'}"
        raise ValueError(f"tracking: {name!r} has no option {unknown[0]!r}{hint}")
    return kind(**options)
