"""The run folders below a folder, whatever their names, and the removal of one.

A driver that trains cannot be asked whether it lives, so a run that has not finished counts as in use while
its files are new: every worker gives a sign of life every few seconds.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from ringspark.estimators import run_layout
from ringspark.estimators.run.stored_runs import LEAST_HOURS, size_and_change, store_clock
from ringspark.estimators.training.history import read_history
from ringspark.pipelines import storage

# Either says that a run was begun here.
_MARKS = {run_layout.OWNER, run_layout.IDENTITY}


@dataclass(frozen=True, kw_only=True)
class ListedRun:
    """One run folder.

    Attributes:
        name: Last part of its URI.
        state: "in use" is a run that has not finished and has changed lately; "stopped" one that has not.
        epochs: Finished epochs.
        idle_seconds: Seconds since its last change; 0 where the store does not tell.
    """

    uri: str
    name: str
    state: Literal["finished", "in use", "stopped"]
    epochs: int
    num_bytes: int
    idle_seconds: float


def runs_in(root: str) -> list[ListedRun]:
    """Returns the runs in a folder and in the folders in it, the newest last; of a run folder, itself.

    Raises:
        ValueError: There is no such folder.
    """
    root = storage.normalize(root)
    names = storage.list_names(root)
    if not names and not storage.exists(root):
        raise ValueError(f"there is no folder {root}")
    if _is_run(root):
        return [look(root)]
    found = [storage.join(root, name) for name in names if not name.startswith(".")]
    return sorted((look(uri) for uri in found if _is_run(uri)), key=lambda run: -run.idle_seconds)


def look(uri: str, now: float | None = None) -> ListedRun:
    """Looks at a run folder.

    Args:
        now: Seconds since 1970 by the clock of the store; by default this machine's.

    Raises:
        ValueError: The folder holds no run.
    """
    uri = storage.normalize(uri).rstrip("/")
    if not _is_run(uri):
        raise ValueError(f"{uri} is no run folder; give the runUri of a training")
    now = time.time() if now is None else now
    num_bytes, changed = size_and_change(uri)
    idle_seconds = 0.0 if changed is None else max(0.0, now - changed)
    state: Literal["finished", "in use", "stopped"] = "stopped"
    if storage.exists(storage.join(uri, run_layout.RESULT)):
        state = "finished"
    elif idle_seconds < LEAST_HOURS * 3600:
        state = "in use"
    epochs = 0
    with suppress(ValueError):  # damaged: `runs show` says so
        epochs = len(read_history(uri))
    return ListedRun(
        uri=uri,
        name=uri.rpartition("/")[2],
        state=state,
        epochs=epochs,
        num_bytes=num_bytes,
        idle_seconds=idle_seconds,
    )


def remove_run(uri: str, *, stopped: bool = False) -> ListedRun:
    """Removes a run folder; returns what it was.

    Args:
        stopped: Whether the caller knows that the run's driver has ended.

    Raises:
        ValueError: It is no run folder, the run may be in use, or the folder holds what no run does.
    """
    run = look(uri)
    if run.state != "finished":
        run = look(uri, store_clock(run.uri.rpartition("/")[0]))
    if others := run_layout.foreign_names(storage.list_names(run.uri)):
        raise ValueError(f"{run.uri} holds {others[0]!r}, which belongs to no run; move it elsewhere")
    if run.state == "in use" and not stopped:
        raise ValueError(
            f"{run.uri} has not finished and changed {run.idle_seconds / 60:.0f} minutes ago, so its driver "
            "may be alive; stop it and give --stopped, or wait for an hour without a change"
        )
    storage.remove(run.uri, recursive=True)
    return run


def _is_run(uri: str) -> bool:
    # Not by the names in there: of a file they are its own.
    return any(storage.exists(storage.join(uri, mark)) for mark in _MARKS)
