"""The checkpoints of a run by their folders: which there are, which is good, which may go.

Only names `step-<10 digits>` directly in `<run>/checkpoints` count; a link never does. A folder without
`checkpoint.json` is what a writer left that was interrupted: no checkpoint, and removed by the next writer.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable

from ringspark.estimators import run_layout
from ringspark.estimators.training.checkpoint.record import Record
from ringspark.estimators.training.checkpoint.snapshot import verify
from ringspark.estimators.training.checkpoint.weights import COMMIT
from ringspark.pipelines import storage

_NAME = re.compile(r"step-([0-9]{10})")

_log = logging.getLogger(__name__)


def checkpoints_uri(run_uri: str) -> str:
    """The folder that holds the checkpoints of a run."""
    return storage.join(run_uri, run_layout.CHECKPOINTS)


def step_uri(root: str, step: int) -> str:
    """The folder of the checkpoint after `step` optimizer steps."""
    return storage.join(root, f"step-{step:010d}")


def steps_in(root: str) -> list[int]:
    """The steps that folders are named after, rising; whether each holds a whole checkpoint or not."""
    matches = (_NAME.fullmatch(name) for name in storage.list_names(root))
    return sorted(int(match[1]) for match in matches if match is not None)


def is_committed(root: str, step: int) -> bool:
    """Whether the writer of a checkpoint came to its end."""
    return storage.exists(storage.join(step_uri(root, step), COMMIT))


def newest_good(root: str, progress: Callable[[], None] = lambda: None) -> tuple[int, Record] | None:
    """Step and record of the newest checkpoint whose files all are as they were written; None without any.

    A damaged one is passed over, with a warning. Runs on rank 0.
    """
    for step in reversed(steps_in(root)):
        uri = step_uri(root, step)
        if storage.is_local(uri) and os.path.islink(uri):
            _log.warning("%s is a link and no checkpoint; it is passed over", uri)
            continue
        try:
            if is_committed(root, step):
                return step, verify(uri, progress)
        except (ValueError, OSError) as error:
            _log.warning("the checkpoint of step %d is passed over: %s", step, error)
    return None


def remove_unfinished(root: str, step: int) -> None:
    """Clears the way for the checkpoint of `step`: what is in its folder, and what was never finished."""
    for found in steps_in(root):
        if found == step or not is_committed(root, found):
            _remove(root, found)


def remove_unfinished_one(root: str, step: int) -> None:
    """Removes the folder of `step` unless it is a checkpoint."""
    if not is_committed(root, step):
        _remove(root, step)


def keep_newest(root: str, step: int, number: int) -> None:
    """Removes all but the newest `number` up to `step`, which has just been written.

    Later ones are of a course that the training has left: it went back, or found them damaged.
    """
    steps = steps_in(root)
    kept = [found for found in steps if found <= step][-number:]
    for found in steps:
        if found not in kept:
            _remove(root, found)


def _remove(root: str, step: int) -> None:
    uri = step_uri(root, step)
    if storage.is_local(uri) and os.path.islink(uri):
        os.unlink(uri)
        return
    # Should the rest be interrupted, what is left is no checkpoint.
    storage.remove(storage.join(uri, COMMIT))
    storage.remove(uri, recursive=True)
