"""Lists the checkpoint folders of a run, finds the newest good one, and removes old ones.

Only folders `step-<10 digits>` directly in `<run>/checkpoints` count, and no links. A folder without
`checkpoint.json` was left by an interrupted writer: it is no checkpoint, and the next writer removes it.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections.abc import Callable

from ringspark.estimators import run_layout
from ringspark.estimators.training.checkpoint import tensor_file
from ringspark.estimators.training.checkpoint.reading import verify
from ringspark.estimators.training.checkpoint.record import Record
from ringspark.estimators.training.checkpoint.weights import COMMIT, replacing
from ringspark.pipelines import storage
from ringspark.pipelines.typed_json import OtherFormatError

_NAME = re.compile(r"step-([0-9]{10})")

_log = logging.getLogger(__name__)


def checkpoints_uri(run_uri: str) -> str:
    """Returns the folder that holds the checkpoints of a run."""
    return storage.join(run_uri, run_layout.CHECKPOINTS)


def step_uri(root: str, step: int) -> str:
    """Returns the folder of the checkpoint after `step` optimizer steps."""
    return storage.join(root, f"step-{step:010d}")


def steps_in(root: str) -> list[int]:
    """Returns the steps in the folders' names, ascending, also of incomplete checkpoints."""
    matches = (_NAME.fullmatch(name) for name in storage.list_names(root))
    return sorted(int(match[1]) for match in matches if match is not None)


def is_committed(root: str, step: int) -> bool:
    """Returns whether a checkpoint was written to its end."""
    return storage.exists(storage.join(step_uri(root, step), COMMIT))


def newest_good(root: str, progress: Callable[[], None] = lambda: None) -> tuple[int, Record] | None:
    """Returns step and record of the newest checkpoint whose files are all undamaged; None without any.

    A damaged one is skipped with a warning. Runs on rank 0.

    Raises:
        OtherFormatError: Another ringspark wrote a newer one: a training from before it would remove it.
        OSError: The store does not give a newer one now: a training from before it would remove it.
    """
    for step in reversed(steps_in(root)):
        uri = step_uri(root, step)
        if storage.is_local(uri) and os.path.islink(uri):
            _log.warning("%s is a link and no checkpoint; it is passed over", uri)
            continue
        try:
            if is_committed(root, step):
                return step, verify(uri, progress)
        except OtherFormatError:
            raise
        except (ValueError, OSError) as error:
            if isinstance(error, OSError) and not _is_damage(error, uri):
                raise OSError(
                    f"{uri} could not be read ({type(error).__name__}: {error}), and a training from before "
                    "it would remove it; resume again once the store answers, or remove that folder"
                ) from error
            _log.warning("the checkpoint of step %d is passed over: %s", step, error)
    return None


def _is_damage(error: OSError, uri: str) -> bool:
    """Whether a file is not as it was written, and not just out of reach."""
    if isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError):
        return True
    # A link that stands for a file, and a broken place of a disk.
    return storage.is_local(uri) and error.errno in (errno.ELOOP, errno.EIO)


def copy_checkpoint(source: str, target: str, step: int) -> None:
    """Copies the checkpoint of `step` from one list to another. Runs on the driver.

    Raises:
        ValueError: There is none, or it is damaged.
    """
    old, new = step_uri(source, step), step_uri(target, step)
    verify(old)
    # What commits it comes last: what is left of an interrupted copy is no checkpoint.
    for name in sorted(storage.list_names(old), key=lambda name: name == COMMIT):
        with storage.open_file(storage.join(old, name)) as file, replacing(new, name) as copy:
            shutil.copyfileobj(file, copy, tensor_file.BLOCK_BYTES)


def remove_unfinished(root: str, step: int) -> None:
    """Removes the folder of `step` and all incomplete checkpoints."""
    for found in steps_in(root):
        if found == step or not is_committed(root, found):
            _remove(root, found)


def remove_unfinished_one(root: str, step: int) -> None:
    """Removes the folder of `step` unless it is a complete checkpoint."""
    if not is_committed(root, step):
        _remove(root, step)


def keep_newest(root: str, step: int, number: int) -> None:
    """Removes all but the newest `number` up to `step`, which has just been written.

    Later ones are obsolete: the training rolled back before them, or found them damaged.
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
    # Removed first: if the rest is interrupted, the folder is no checkpoint any more.
    storage.remove(storage.join(uri, COMMIT))
    storage.remove(uri, recursive=True)
