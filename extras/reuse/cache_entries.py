"""Folders of cached shards: layout, listing and removal.

    <root>/<first 20 digits of the digest>/.ringspark-entry               marks our folder; holds the key
                                           _shards-<id>/, manifest.json   see `write_shards`

The manifest commits an entry. Files of other programs are left alone.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from datetime import datetime, timezone

from ringspark.pipelines import storage
from ringspark.pipelines.folder_removal import FOLDER_PREFIX, SHARD_PATHS, remove_folder
from ringspark.pipelines.manifest import MANIFEST_NAME, ShardManifest
from ringspark.pipelines.typed_json import JsonText

MARKER_NAME = ".ringspark-entry"
DIGITS = 20

_FOLDER = re.compile(rf"[0-9a-f]{{{DIGITS}}}")
_OURS = re.compile(rf"{re.escape(MARKER_NAME)}|{re.escape(MANIFEST_NAME)}|{FOLDER_PREFIX}\w+")


@dataclass(frozen=True, kw_only=True)
class CacheEntry(JsonText):
    """Content of the marker file: the user's key, and the UTC time of the write in ISO 8601."""

    key: str
    created: str


@dataclass(frozen=True, kw_only=True)
class CachedShards:
    """One entry of a cache.

    Attributes:
        key: Key that `cached_shards` was given.
        uri: Folder of the shards, for `ShardManifest.load`.
        created: UTC time of the write, ISO 8601; empty if unfinished: being written, or interrupted.
        num_bytes: Bytes that removing the entry frees.
    """

    key: str
    uri: str
    created: str = ""
    rows: int = 0
    num_bytes: int
    columns: tuple[str, ...] = ()


def list_cached(root: str | os.PathLike[str]) -> list[CachedShards]:
    """Returns all entries below `root`, the newest first and the unfinished ones last."""
    return sorted(_entries(root).values(), key=lambda each: (each.created, each.key, each.uri), reverse=True)


def remove_cached(root: str | os.PathLike[str], key: str | None = None) -> int:
    """Removes entries; returns the number of bytes freed. Leaves files of other programs.

    Args:
        root: Folder of the cache; see `list_cached`.
        key: Key of the entries, which may differ in columns and settings; None removes all entries.

    Raises:
        ValueError: No entry has the key.
    """
    entries = _entries(root)
    chosen = {folder: entry for folder, entry in entries.items() if key in (None, entry.key)}
    if key is not None and not chosen:
        known = ", ".join(sorted({entry.key for entry in entries.values()})) or "none"
        raise ValueError(f"no entry has the key {key!r} in {os.fspath(root)!r}; pass one of: {known}")
    for folder in chosen:
        _remove(folder)
    return sum(entry.num_bytes for entry in chosen.values())


def folder_of(root: str | os.PathLike[str], digest: str) -> str:
    return storage.join(storage.normalize(root), digest[:DIGITS])


def mark(folder: str, key: str) -> None:
    """Writes the marker file into an entry's folder."""
    entry = CacheEntry(key=key, created=datetime.now(timezone.utc).isoformat(timespec="seconds"))
    storage.write_atomic(storage.join(folder, MARKER_NAME), entry.to_json().encode())


def abandon(folder: str) -> None:
    """Removes an entry's folder if a failed write has left only the marker file."""
    if storage.list_names(folder) == [MARKER_NAME]:
        _remove(folder)


def _entries(root: str | os.PathLike[str]) -> dict[str, CachedShards]:
    """Returns the entries below `root` by their folders."""
    root = storage.normalize(root)
    folders = [storage.join(root, name) for name in storage.list_names(root) if _FOLDER.fullmatch(name)]
    return {folder: entry for folder in folders if (entry := _describe_folder(folder)) is not None}


def _describe_folder(folder: str) -> CachedShards | None:
    try:
        entry = CacheEntry.from_json(storage.read_bytes(storage.join(folder, MARKER_NAME)))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    num_bytes = sum(_bytes_below(storage.join(folder, name)) for name in _list_ours(folder))
    unfinished = CachedShards(key=entry.key, uri=folder, num_bytes=num_bytes)
    try:
        manifest = ShardManifest.load(folder)
    except ValueError:
        return unfinished
    columns = tuple(column.name for column in manifest.columns)
    return replace(unfinished, created=entry.created, rows=manifest.num_rows, columns=columns)


def _list_ours(folder: str) -> list[str]:
    return [name for name in storage.list_names(folder) if _OURS.fullmatch(name)]


def _bytes_below(uri: str) -> int:
    fs, path = storage.filesystem(uri)
    try:
        return int(fs.du(path))
    except FileNotFoundError:
        return 0


def _remove(folder: str) -> None:
    # The commit goes first, so that no reader finds an entry with missing shards. The marker goes last, so
    # that an interrupted removal is still listed.
    order = {MANIFEST_NAME: 0, MARKER_NAME: 2}
    for name in sorted(_list_ours(folder), key=lambda name: order.get(name, 1)):
        remove_folder(storage.join(folder, name), SHARD_PATHS)
    storage.remove_if_empty(folder)
