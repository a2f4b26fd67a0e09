"""Commits a write: readers see none of its files before the commit, and all of them after it.

A failed write removes its own files. If a writer was killed, a later write removes its folder once the folder
is a day old.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress

from ringspark.pipelines import folder_removal, storage
from ringspark.pipelines.folder_removal import FILES, FOLDER_PREFIX, SHARD_PATHS
from ringspark.pipelines.manifest import MANIFEST_NAME, ShardManifest

# Temporary files of `storage.write_atomic` and `storage.check_writable` whose process was killed.
_TEMPORARY_PREFIXES = (f".{MANIFEST_NAME}.", ".ringspark-probe-", "..ringspark-probe-")
# A writer that has not changed its folder for this long counts as dead.
_ABANDONED_SECONDS = 24 * 3600

_logger = logging.getLogger(__name__)


def previous_folders(uri: str, overwrite: bool) -> list[str]:
    if not storage.exists(storage.join(uri, MANIFEST_NAME)):
        return []
    if not overwrite:
        raise ValueError(f"{uri!r} holds shards already; choose another folder or pass overwrite=True")
    try:
        folders = {file.path.split("/")[0] for file in ShardManifest.load(uri).files}
        # A manifest may name any folder; only folders that write_shards created may be removed.
        return sorted(folder for folder in folders if folder.startswith(FOLDER_PREFIX))
    except ValueError as error:
        _logger.warning("the shards in %r are replaced, but their files are kept: %s", uri, error)
        return []


def commit(manifest: ShardManifest, overwrite: bool) -> None:
    """Makes the shards visible to readers.

    Raises:
        ValueError: The driver does not see a file that an executor wrote, or another writer has committed
            first.
        RuntimeError: The store fails.
    """
    seen: dict[str, set[str]] = {}
    for file in manifest.files:
        folder, _, name = file.path.rpartition("/")
        if folder not in seen:
            seen[folder] = set(storage.list_names(storage.join(manifest.uri, folder)))
        if name not in seen[folder]:
            raise ValueError(
                f"the driver does not see {file.path!r}, which an executor wrote to {manifest.uri!r}; "
                "use storage that driver and executors share"
            )
    try:
        manifest.save(overwrite=overwrite)
    except FileExistsError:
        raise ValueError(
            f"another writer has written shards to {manifest.uri!r} meanwhile; choose another folder"
        ) from None
    except storage.BrokenOffError:
        raise  # the new manifest exists under another name
    except OSError as error:
        raise RuntimeError(
            f"writing the manifest of {manifest.uri!r} failed ({type(error).__name__}: {error}); "
            "write the shards again"
        ) from error


def clean(manifest: ShardManifest, folder: str, previous: Sequence[str]) -> None:
    """Removes files that are not needed after a commit.

    These are files of superseded task attempts, old shards, and files of writers that were killed. If the
    store fails, a warning is logged, because the commit is valid anyway.
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
    """Removes a failed write's folder unless the manifest may name it, and an empty `uri` if `is_new`."""
    try:
        if folder.encode() in storage.read_bytes(storage.join(uri, MANIFEST_NAME)):
            return
    except FileNotFoundError:
        pass
    except OSError as error:
        _logger.warning("kept the files in %r, because the store cannot read the manifest: %s", uri, error)
        return
    _remove(uri, [folder])
    if is_new:
        storage.remove_if_empty(uri)


def discard_shards(manifest: ShardManifest) -> None:
    """Removes the files of one write, but neither shards nor files that others put into its folder."""
    uri, names = storage.normalize(manifest.uri), {file.path.split("/")[0] for file in manifest.files}
    with suppress(OSError, ValueError):
        if ShardManifest.load(uri).files == manifest.files:
            storage.remove(storage.join(uri, MANIFEST_NAME))
    _remove(uri, sorted(name for name in names if name.startswith(FOLDER_PREFIX)))
    storage.remove_if_empty(uri)


def discard_abandoned(prefix: str) -> None:
    """Removes the shards in all folders `prefix`... that a killed writer left; others may be in use."""
    parent, _, start = prefix.rpartition("/")
    for name in storage.list_names(parent):
        if name.startswith(start) and _is_abandoned(parent, name):
            folder_removal.discard(storage.join(parent, name), SHARD_PATHS)


def _is_abandoned(uri: str, name: str) -> bool:
    with suppress(OSError):
        newest = storage.newest_change(storage.join(uri, name))
        return newest is not None and time.time() - newest > _ABANDONED_SECONDS
    return False


def _remove(uri: str, names: Sequence[str]) -> None:
    for name in names:  # best effort: an error here must not hide the first one
        folder_removal.discard(storage.join(uri, name), FILES)
