"""Lists and removes run folders.

A fit without `runUri` makes `run-<id>` and `shards-<id>` in its storageUri. They stay if the driver dies. A
finished run holds the weights of its model until the model is saved elsewhere.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from ringspark.estimators import run_layout
from ringspark.estimators.run.store_clock import read_store_clock
from ringspark.estimators.stages.summary import TrainingSummary
from ringspark.estimators.training.history import read_history
from ringspark.pipelines import storage
from ringspark.pipelines.folder_removal import SHARD_PATHS, discard, remove_folder
from ringspark.pipelines.typed_json import parse_object

_logger = logging.getLogger(__name__)

LEAST_HOURS = 1.0

# The presence of either means that a run was begun here.
_MARKS = {run_layout.OWNER, run_layout.IDENTITY}
# Folders that a fit without `runUri` makes.
_LEFT_BEHIND = re.compile(r"(run|shards)-[0-9a-f]{12}")


@dataclass(frozen=True, kw_only=True)
class ListedRun:
    """One run folder, or a folder of shards that a fit wrote to its storageUri.

    An unfinished run is "in use" if it has changed within the last hour. `idle_seconds` is 0 if the store
    does not record changes.
    """

    uri: str
    state: Literal["finished", "in use", "stopped", "shards"]
    epochs: int
    num_bytes: int
    idle_seconds: float

    @property
    def name(self) -> str:
        return self.uri.rpartition("/")[2]


def list_run_folders(root: str) -> list[ListedRun]:
    """Returns the runs in a folder, the newest last. If the folder is a run itself, returns this run."""
    root = storage.normalize(root)
    names = storage.list_names(root)
    if not names and not storage.exists(root):
        raise ValueError(f"there is no folder {root}")
    if _is_run(root):
        return [inspect_run(root)]
    found = [storage.join(root, name) for name in names if not name.startswith(".")]
    return sorted((inspect_run(uri) for uri in found if _is_run(uri)), key=lambda run: -run.idle_seconds)


def inspect_run(uri: str, now: float | None = None) -> ListedRun:
    """Returns the state of a run folder; `now` is the store's time, by default the local time."""
    uri = storage.normalize(uri).rstrip("/")
    if not _is_run(uri):
        raise ValueError(f"{uri} is no run folder; give the runUri of a training")
    return describe_folder(uri, now)


def describe_folder(uri: str, now: float | None = None) -> ListedRun:
    """Returns the state of a run folder, or of a folder that a fit named like one."""
    num_bytes, changed = _measure_folder(uri)
    now = time.time() if now is None else now
    idle_seconds = 0.0 if changed is None else max(0.0, now - changed)
    is_finished = storage.exists(storage.join(uri, run_layout.RESULT))
    is_new = idle_seconds < LEAST_HOURS * 3600
    epochs = 0
    with suppress(ValueError):  # damaged: `runs show` reports it
        epochs = len(read_history(uri))
    return ListedRun(
        uri=uri,
        state="finished" if is_finished else "in use" if is_new else "stopped",
        epochs=epochs,
        num_bytes=num_bytes,
        idle_seconds=idle_seconds,
    )


def _measure_folder(uri: str) -> tuple[int, float | None]:
    """Returns the bytes of a folder, and the time of its last change; None if the store does not know."""
    fs, path = storage.filesystem(uri)
    fs.invalidate_cache()
    size, changes = 0, []
    with storage.store_errors(uri):
        files = fs.find(path, detail=True)
        if not files and storage.is_local(uri):
            files = {path: {}}
        for name, info in files.items():
            size += int(info.get("size") or 0)
            with suppress(FileNotFoundError, NotImplementedError):
                changes.append(float(fs.modified(name).timestamp()))
    return size, max(changes, default=None)


def remove_run(uri: str, *, stopped: bool = False) -> ListedRun:
    """Removes a run folder; returns its last state. `stopped` confirms that the run's driver has ended."""
    run = inspect_run(uri)
    if run.state != "finished":
        run = inspect_run(uri, read_store_clock(run.uri.rpartition("/")[0]))
    if others := run_layout.foreign_names(storage.list_names(run.uri)):
        raise ValueError(f"{run.uri} holds {others[0]!r}, which belongs to no run; move it elsewhere")
    if run.state == "in use" and not stopped:
        raise ValueError(
            f"{run.uri} has not finished and changed {run.idle_seconds / 60:.0f} minutes ago, so its driver "
            "may be alive; stop it and give --stopped, or wait for an hour without a change"
        )
    remove_folder(run.uri, run_layout.PATHS, run_layout.find_mark(storage.list_names(run.uri)))
    return run


def remove_run_of(summary: TrainingSummary, remove: Callable[..., object] = remove_folder) -> None:
    """Removes the folder of the training with this summary; raises ValueError if it is of another one."""

    def is_same(content: bytes) -> bool:
        found = TrainingSummary.of_run(content.decode(), summary.run_uri)[0]
        return repr((found.epochs, found.seconds)) == repr((summary.epochs, summary.seconds))  # NaN differs

    remove(storage.normalize(summary.run_uri), run_layout.PATHS, run_layout.RESULT, is_same)


def _is_run(uri: str) -> bool:
    # Not `list_names`, which lists a file as itself.
    return any(storage.exists(storage.join(uri, mark)) for mark in _MARKS)


def list_runs(root: str, now: float | None = None) -> list[ListedRun]:
    """Returns the runs and shards of fits in the storageUri `root`, the longest idle first.

    `now` is the current time on the store's clock; None takes the local clock. A change of a run that reads
    a folder of shards also counts as a change of this folder.
    """
    root = storage.normalize(root)
    names = [name for name in storage.list_names(root) if _LEFT_BEHIND.fullmatch(name)]
    found = {name: describe_folder(storage.join(root, name), now) for name in names}
    for name in names:
        if name.startswith("shards"):
            found[name] = replace(found[name], state="shards")
        elif (shards := found.get(_shards_of(found[name].uri) or "")) is not None:
            idle_seconds = min(shards.idle_seconds, found[name].idle_seconds)
            found[shards.name] = replace(shards, idle_seconds=idle_seconds)
    return sorted(found.values(), key=lambda run: -run.idle_seconds)


def remove_runs(root: str, older_than_hours: float, *, finished: bool = False) -> list[ListedRun]:
    """Removes runs whose driver died, and unused shards; returns them.

    A run counts as dead after `older_than_hours` without a change. Choose more hours than
    a live run may take to wait for slots, to compute rows or to evaluate in a search. `finished` also
    removes finished runs; their models must have been saved elsewhere.
    """
    if not older_than_hours >= LEAST_HOURS:
        raise ValueError(
            f"runs that changed within an hour may be alive; remove only runs without a change for "
            f"{LEAST_HOURS:g} hours or more, got {older_than_hours:g}"
        )
    root = storage.normalize(root)
    if not storage.list_names(root):
        return []
    old = [
        run
        for run in list_runs(root, read_store_clock(root))
        if (finished or run.state != "finished") and run.idle_seconds > older_than_hours * 3600
    ]
    return [r for r in old if (discard(r.uri, SHARD_PATHS) if r.state == "shards" else discard_run(r.uri))]


def discard_run(uri: str) -> bool:
    """Removes the folder of a run that the caller knows to be its own; a failure is only logged."""
    try:
        mark = run_layout.find_mark(storage.list_names(uri))
    except OSError as error:  # the store fails for a moment
        _logger.warning("could not remove %s: %s", uri, error)
        return False
    return discard(uri, run_layout.PATHS, mark)


def _shards_of(run_uri: str) -> str | None:
    with suppress(FileNotFoundError, NotADirectoryError, ValueError):
        config = parse_object(storage.read_bytes(storage.join(run_uri, run_layout.CONFIG)), allow_nan=True)
        return str(config.get("shards_uri")).rpartition("/")[2]
    return None
