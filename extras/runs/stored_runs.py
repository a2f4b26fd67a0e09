"""Lists and removes folders that fits without `runUri` leave in their storageUri.

Such a fit makes `run-<id>` and `shards-<id>`. They stay if the driver dies. A finished run holds the weights
of its model until the model is saved elsewhere.
"""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from dataclasses import replace

from ringspark.estimators import run_layout
from ringspark.estimators.run.store_clock import read_store_clock
from ringspark.extras.runs.listing import LEAST_HOURS, ListedRun, describe_folder
from ringspark.pipelines import storage
from ringspark.pipelines.folder_removal import SHARD_PATHS, discard
from ringspark.pipelines.typed_json import parse_object

_logger = logging.getLogger(__name__)

_FOLDER = re.compile(r"(run|shards)-[0-9a-f]{12}")


def list_runs(root: str, now: float | None = None) -> list[ListedRun]:
    """Returns the runs and shards of fits in the storageUri `root`, the longest idle first.

    `now` is the current time on the store's clock; None takes the local clock. A change of a run that reads
    a folder of shards also counts as a change of this folder.
    """
    root = storage.normalize(root)
    names = [name for name in storage.list_names(root) if _FOLDER.fullmatch(name)]
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
