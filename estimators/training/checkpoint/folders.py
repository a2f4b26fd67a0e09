"""The checkpoint folders of a run: `<run>/checkpoints/step-<10 digits>`.

Only a folder with `checkpoint.json` is complete. Links are ignored.
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
from ringspark.estimators.training.checkpoint.weights import COMMIT, replacing
from ringspark.pipelines import storage
from ringspark.pipelines.folder_removal import remove_folder
from ringspark.pipelines.typed_json import OtherFormatError

_NAME = re.compile(r"step-([0-9]{10})")

_log = logging.getLogger(__name__)


def checkpoints_uri(run_uri: str) -> str:
    return storage.join(run_uri, run_layout.CHECKPOINTS)


def step_uri(root: str, step: int) -> str:
    return storage.join(root, f"step-{step:010d}")


def list_steps(root: str) -> list[int]:
    """Returns the steps of all checkpoint folders, ascending; incomplete checkpoints too."""
    matches = (_NAME.fullmatch(name) for name in storage.list_names(root))
    return sorted(int(match[1]) for match in matches if match is not None)


def is_committed(root: str, step: int) -> bool:
    return storage.exists(storage.join(step_uri(root, step), COMMIT))


def find_newest_good(root: str, progress: Callable[[], None] = lambda: None) -> int | None:
    """Returns the step of the newest undamaged checkpoint, or None. Runs on rank 0.

    Resuming from an older checkpoint would remove a newer one. So this function raises OtherFormatError if a
    newer checkpoint has the format of another version, and OSError if it cannot be read at present.
    """
    for step in reversed(list_steps(root)):
        uri = step_uri(root, step)
        if storage.is_local(uri) and os.path.islink(uri):
            _log.warning("%s is a link, not a checkpoint; it is skipped", uri)
            continue
        try:
            if is_committed(root, step):
                verify(uri, progress)
                return step
        except OtherFormatError:
            raise
        except (ValueError, OSError) as error:
            if isinstance(error, OSError) and not _is_damage(error, uri):
                raise OSError(
                    f"{uri} could not be read ({type(error).__name__}: {error}), and resuming from an older "
                    "checkpoint would remove it; resume when the store answers, or remove that folder"
                ) from error
            _log.warning("the checkpoint of step %d is skipped: %s", step, error)
    return None


def _is_damage(error: OSError, uri: str) -> bool:
    if isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError):
        return True
    # ELOOP: a link in place of the file. EIO: a bad block of the disk.
    return storage.is_local(uri) and error.errno in (errno.ELOOP, errno.EIO)


def copy_checkpoint(source: str, target: str, step: int) -> None:
    """Copies a checkpoint between two checkpoint folders. Raises ValueError if it is damaged."""
    old, new = step_uri(source, step), step_uri(target, step)
    verify(old)
    # The commit file comes last, so an interrupted copy is no checkpoint.
    for name in sorted(storage.list_names(old), key=lambda name: name == COMMIT):
        with storage.open_file(storage.join(old, name)) as file, replacing(new, name) as copy:
            shutil.copyfileobj(file, copy, tensor_file.BLOCK_BYTES)


def remove_unfinished(root: str, step: int | None = None) -> None:
    """Removes all incomplete checkpoints, and the folder of `step`."""
    for found in list_steps(root):
        if found == step or not is_committed(root, found):
            _remove(root, found)


def keep_newest(root: str, step: int, number: int) -> None:
    """Keeps the newest `number` checkpoints up to the just written `step`; removes all other checkpoints."""
    steps = list_steps(root)
    kept = [found for found in steps if found <= step][-number:]
    for found in steps:
        if found not in kept:
            _remove(root, found)


def _remove(root: str, step: int) -> None:
    uri = step_uri(root, step)
    if storage.is_local(uri) and os.path.islink(uri):
        os.unlink(uri)
        return
    # Removed first, so that an interrupted removal leaves no checkpoint.
    storage.remove(storage.join(uri, COMMIT))
    remove_folder(uri, run_layout.PARTS)
