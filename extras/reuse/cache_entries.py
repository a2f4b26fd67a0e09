"""Folders of cached shards: layout, listing and removal.

    <root>/<first 20 digits of the digest>/.ringspark-entry   marks our folder; holds the user's key
                                           run-<id>/          shards and manifest of one write
                                           entry.json         which run is valid; written last: the commit

Each writer has its own run folder, so concurrent writers with the same key do not collide. Files of other
programs are left alone.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone

from ringspark.pipelines import storage
from ringspark.pipelines.folder_removal import SHARD_PATHS, remove_folder
from ringspark.pipelines.manifest import ShardManifest
from ringspark.pipelines.typed_json import parse_object, record

ENTRY_NAME = "entry.json"
MARKER_NAME = ".ringspark-entry"
DIGITS = 20

_FOLDER = re.compile(rf"[0-9a-f]{{{DIGITS}}}")
_RUN = re.compile(r"run-[0-9a-f]{12}")


@dataclass(frozen=True, kw_only=True)
class CacheEntry:
    """Content of an `entry.json`.

    Attributes:
        key: The user's key.
        digest: SHA-256 of key, schema and settings, in hexadecimal.
        run: Name of the run folder with the valid shards.
        created: UTC time of the write, in ISO 8601.
    """

    key: str
    digest: str
    run: str
    created: str = ""
    rows: int = 0
    num_bytes: int = 0
    columns: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CachedShards:
    """One entry of a cache.

    Attributes:
        key: Key that `cached_shards` was given.
        uri: Folder of the shards, for `ShardManifest.load`. For an unfinished entry, the entry's folder.
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


def begin(root: str | os.PathLike[str], key: str, digest: str) -> str:
    """Creates an entry's folder with its marker file. Returns the name of a new run folder."""
    storage.write_atomic(storage.join(folder_of(root, digest), MARKER_NAME), key.encode())
    return f"run-{uuid.uuid4().hex[:12]}"


def publish(root: str | os.PathLike[str], entry: CacheEntry, manifest: ShardManifest) -> None:
    """Commits an entry whose shards are complete; replaces an older entry with the same digest."""
    folder = folder_of(root, entry.digest)
    complete = replace(
        entry,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        rows=manifest.num_rows,
        num_bytes=sum(file.num_bytes for file in manifest.files),
        columns=tuple(column.name for column in manifest.columns),
    )
    # The marker is written again, because a concurrent writer that failed may have removed it.
    storage.write_atomic(storage.join(folder, MARKER_NAME), entry.key.encode())
    storage.write_atomic(storage.join(folder, ENTRY_NAME), json.dumps(asdict(complete), indent=1).encode())


def abandon(root: str | os.PathLike[str], digest: str, run: str) -> None:
    folder = folder_of(root, digest)
    remove_folder(storage.join(folder, run), SHARD_PATHS)
    if storage.list_names(folder) == [MARKER_NAME]:
        _remove(folder)


def load_entry(folder: str) -> CacheEntry | None:
    try:
        entry = record(CacheEntry, parse_object(storage.read_bytes(storage.join(folder, ENTRY_NAME))))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    names_match = entry.digest.startswith(folder.rpartition("/")[2]) and _RUN.fullmatch(entry.run)
    return entry if names_match else None


def _entries(root: str | os.PathLike[str]) -> dict[str, CachedShards]:
    """Returns the entries below `root` by their folders."""
    root = storage.normalize(root)
    folders = [storage.join(root, name) for name in storage.list_names(root) if _FOLDER.fullmatch(name)]
    return {folder: entry for folder in folders if (entry := _describe_folder(folder)) is not None}


def _describe_folder(folder: str) -> CachedShards | None:
    names = storage.list_names(folder)
    entry = load_entry(folder) if ENTRY_NAME in names else None
    num_bytes = sum(_bytes_below(storage.join(folder, name)) for name in names if _is_ours(name))
    if entry is not None:
        return CachedShards(
            key=entry.key,
            uri=storage.join(folder, entry.run),
            created=entry.created,
            rows=entry.rows,
            num_bytes=num_bytes,
            columns=entry.columns,
        )
    if MARKER_NAME not in names:
        return None
    key = storage.read_bytes(storage.join(folder, MARKER_NAME)).decode()
    return CachedShards(key=key, uri=folder, num_bytes=num_bytes)


def _is_ours(name: str) -> bool:
    return name in (ENTRY_NAME, MARKER_NAME) or _RUN.fullmatch(name) is not None


def _bytes_below(uri: str) -> int:
    fs, path = storage.filesystem(uri)
    try:
        return int(fs.du(path))
    except FileNotFoundError:
        return 0


def _remove(folder: str) -> None:
    # The commit goes first, so that no reader finds an entry with missing shards. The marker goes last, so
    # that an interrupted removal is still listed.
    order = {ENTRY_NAME: 0, MARKER_NAME: 2}
    ours = filter(_is_ours, storage.list_names(folder))
    for name in sorted(ours, key=lambda name: order.get(name, 1)):
        remove_folder(storage.join(folder, name), SHARD_PATHS)
    storage.remove_if_empty(folder)
