"""Lists and removes folders that fits without `runUri` leave in their storageUri.

Such a fit makes `run-<id>` and `shards-<id>`. They stay if the driver dies. A finished run holds the weights
of its model until the model is saved elsewhere.
"""

from __future__ import annotations

import re
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from ringspark.estimators import run_layout
from ringspark.estimators.run.store_clock import read_store_clock
from ringspark.pipelines import storage
from ringspark.pipelines.folder_removal import SHARD_PATHS, discard
from ringspark.pipelines.manifest import MANIFEST_NAME
from ringspark.pipelines.typed_json import parse_object

LEAST_HOURS = 1.0

_FOLDER = re.compile(r"(run|shards)-[0-9a-f]{12}")


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """One folder of a storageUri; `idle_seconds` is 0 if the store does not record changes.

    A folder of shards, or of a table's manifest, has the state "shards". A change of a run that reads such a
    folder also counts as a change of the folder.
    """

    uri: str
    state: Literal["finished", "unfinished", "shards"]
    num_bytes: int
    idle_seconds: float


def list_runs(root: str, now: float | None = None) -> list[StoredRun]:
    """Returns the runs and shards of fits in the storageUri `root`, the longest idle first.

    `now` is the current time on the store's clock; None takes the local clock.
    """
    root = storage.normalize(root)
    now = time.time() if now is None else now
    names = [
        name
        for name in storage.list_names(root)
        if _FOLDER.fullmatch(name)
        # An entry of `cached_shards` has such a name too, with a manifest directly in it.
        and not (name.startswith("run") and storage.exists(storage.join(root, name, MANIFEST_NAME)))
    ]
    sizes, changes = {}, {}
    for name in names:
        sizes[name], changed = measure_folder(storage.join(root, name))
        changes[name] = now if changed is None else changed
    for name in names:
        shards = _shards_of(storage.join(root, name))
        if shards in changes:
            changes[shards] = max(changes[shards], changes[name])
    found = []
    for name in names:
        state: Literal["finished", "unfinished", "shards"] = "shards"
        if name.startswith("run"):
            done = storage.exists(storage.join(root, name, run_layout.RESULT))
            state = "finished" if done else "unfinished"
        idle = max(0.0, now - changes[name])
        found.append(
            StoredRun(uri=storage.join(root, name), state=state, num_bytes=sizes[name], idle_seconds=idle)
        )
    return sorted(found, key=lambda run: -run.idle_seconds)


def remove_runs(root: str, older_than_hours: float, *, finished: bool = False) -> list[StoredRun]:
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
    return discard(uri, run_layout.PATHS, run_layout.find_mark(storage.list_names(uri)))


def measure_folder(uri: str) -> tuple[int, float | None]:
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


def _shards_of(run_uri: str) -> str | None:
    with suppress(FileNotFoundError, NotADirectoryError, ValueError):
        config = parse_object(storage.read_bytes(storage.join(run_uri, run_layout.CONFIG)), allow_nan=True)
        return str(config.get("shards_uri")).rpartition("/")[2]
    return None
