"""Lists the run folders below a folder, whatever their names, and removes one of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from ringspark.estimators import run_layout
from ringspark.estimators.run.store_clock import read_store_clock
from ringspark.estimators.stages.summary import TrainingSummary
from ringspark.estimators.training.history import read_history
from ringspark.pipelines import storage
from ringspark.pipelines.folder_removal import remove_folder

LEAST_HOURS = 1.0

# The presence of either means that a run was begun here.
_MARKS = {run_layout.OWNER, run_layout.IDENTITY}


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
            with suppress(FileNotFoundError, NotImplementedError):
                changes.append(float(fs.modified(name).timestamp()))
                size += int(info.get("size") or 0)
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
