"""The commit of `write_shards`: before it no reader sees the files of a write, after it they are the data.

A write that fails removes its files. A write that is killed cannot; it leaves
its files in a separate folder, which a later write removes when it is a day old.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from ringspark.pipelines import storage
from ringspark.pipelines.manifest import MANIFEST_NAME, ShardManifest

FOLDER_PREFIX = "_shards-"
# Temporary files that `storage.write_atomic` and `storage.check_writable` leave when their process is killed.
_TEMPORARY_PREFIXES = (f".{MANIFEST_NAME}.", ".ringspark-probe-", "..ringspark-probe-")
# A writer that has not touched its folder for this long is taken for dead.
_ABANDONED_SECONDS = 24 * 3600

_logger = logging.getLogger(__name__)


def previous_folders(uri: str, overwrite: bool) -> list[str]:
    """Returns the folders that hold the files of the shards that are in `uri` now."""
    if not storage.exists(storage.join(uri, MANIFEST_NAME)):
        return []
    if not overwrite:
        raise ValueError(f"{uri!r} holds shards already; choose another folder or pass overwrite=True")
    try:
        folders = {file.path.split("/")[0] for file in ShardManifest.load(uri).files}
        # A manifest may name any folder, and only what a write of ours made is ours to remove.
        return sorted(folder for folder in folders if folder.startswith(FOLDER_PREFIX))
    except ValueError as error:
        _logger.warning("the shards in %r are replaced, their files are left there: %s", uri, error)
        return []


def commit(manifest: ShardManifest, overwrite: bool) -> None:
    """Makes the shards visible, if the driver sees every file of them.

    Raises:
        ValueError: The driver does not see a file, or another writer was first.
        RuntimeError: The store failed.
    """
    seen: dict[str, set[str]] = {}
    for file in manifest.files:
        folder, _, name = file.path.rpartition("/")
        if folder not in seen:
            seen[folder] = set(storage.list_names(storage.join(manifest.uri, folder)))
        if name not in seen[folder]:
            raise ValueError(
                f"the driver does not see {file.path!r} that an executor wrote to {manifest.uri!r}; "
                "use storage that driver and executors share"
            )
    try:
        manifest.save(overwrite=overwrite)
    except FileExistsError:
        raise ValueError(
            f"another writer has put shards into {manifest.uri!r} meanwhile; choose another folder"
        ) from None
    except storage.BrokenOffError:
        raise  # the new manifest is there, under another name
    except OSError as error:
        raise RuntimeError(
            f"writing the manifest of {manifest.uri!r} failed ({type(error).__name__}: {error}); "
            "write the shards again"
        ) from error


def clean(manifest: ShardManifest, folder: str, previous: Sequence[str]) -> None:
    """Removes files that nobody needs after the commit: of losing attempts, old shards and dead writers.

    Best effort: the commit stands, so a failure of the store is no error now.
    """
    uri, keep = manifest.uri, {file.path for file in manifest.files}
    try:
        written = [f"{folder}/{name}" for name in storage.list_names(storage.join(uri, folder))]
        _remove(uri, [*(path for path in written if path not in keep), *previous])
        owned = {path.split("/")[0] for path in keep}
        for name in storage.list_names(uri):
            is_ours = name.startswith((FOLDER_PREFIX, *_TEMPORARY_PREFIXES))
            if is_ours and name not in owned and _is_abandoned(uri, name):
                _remove(uri, [name])
    except OSError as error:
        _logger.warning("could not clean up %r: %s", uri, error)


def discard(uri: str, folder: str, is_new: bool) -> None:
    """Removes the files of a failed write, unless its commit may have reached the store nevertheless."""
    try:
        if folder.encode() in storage.read_bytes(storage.join(uri, MANIFEST_NAME)):
            return
    except FileNotFoundError:
        pass
    except OSError as error:
        _logger.warning("left the files in %r, as the store does not tell what was committed: %s", uri, error)
        return
    _remove(uri, [folder])
    if is_new:
        storage.remove_if_empty(uri)


def _is_abandoned(uri: str, name: str) -> bool:
    """Whether another write's file, or every file in its folder, is so old that its writer must be dead."""
    try:
        newest = storage.newest_change(storage.join(uri, name))
    except OSError:
        return False
    return newest is not None and time.time() - newest > _ABANDONED_SECONDS


def _remove(uri: str, names: Sequence[str]) -> None:
    """Removes files and folders. Best effort: an error here must not hide the first one."""
    for name in names:
        try:
            storage.remove(storage.join(uri, name), recursive=True)
        except OSError as error:
            _logger.warning("could not remove %r from %r: %s", name, uri, error)
