"""Folders of cached shards: layout, listing and removal.

    <root>/<first 20 digits of the key>/.ringspark-entry   marks our folder; holds the key
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
KEY_DIGITS = 20

_FOLDER = re.compile(rf"[0-9a-f]{{{KEY_DIGITS}}}")
_RUN = re.compile(r"run-[0-9a-f]{12}")


@dataclass(frozen=True, kw_only=True)
class CacheEntry:
    """Content of an `entry.json`.

    Attributes:
        key: SHA-256 of everything that determines the rows, in hexadecimal.
        run: Name of the run folder with the valid shards.
        refusal: Reason why these shards must not be reused; None if they may be.
        created: UTC time of the write, in ISO 8601.
    """

    key: str
    run: str
    refusal: str | None
    created: str = ""
    rows: int = 0
    num_bytes: int = 0
    columns: tuple[str, ...] = ()
    plan: str
    plan_summary: str
    settings: str
    sources: str


@dataclass(frozen=True, kw_only=True)
class CachedShards:
    """One entry of a cache.

    Attributes:
        key: Key of the entry; `remove_cached` takes its first digits.
        uri: Folder of the shards, for `ShardManifest.load`. For an unfinished entry, the entry's folder.
        created: UTC time of the write, ISO 8601; empty if unfinished.
        num_bytes: Bytes that removing the entry frees.
        plan: Operators of the plan, or the problem of the entry.
        is_reusable: Whether `cached_shards` may return these shards.
    """

    key: str
    uri: str
    created: str
    rows: int
    num_bytes: int
    columns: tuple[str, ...]
    plan: str
    is_reusable: bool


def list_cached(root: str | os.PathLike[str]) -> list[CachedShards]:
    """Returns all entries below `root`, the newest first and the unfinished ones last."""
    root = storage.normalize(root)
    found = [
        _describe_folder(storage.join(root, name))
        for name in storage.list_names(root)
        if _FOLDER.fullmatch(name)
    ]
    return sorted((each for each in found if each), key=lambda each: (each.created, each.key), reverse=True)


def remove_cached(root: str | os.PathLike[str], key: str | None = None) -> int:
    """Removes one entry or all entries; returns the number of bytes freed. Leaves files of other programs.

    Args:
        root: Folder of the cache; see `list_cached`.
        key: The entry's key or its first digits; None removes all entries.

    Raises:
        ValueError: No entry or several entries match the key.
    """
    entries = list_cached(root)
    if key is not None:
        known = ", ".join(entry.key[:KEY_DIGITS] for entry in entries) or "none"
        entries = [entry for entry in entries if key and entry.key.startswith(key)]
        if len(entries) != 1:
            fault = "several entries have keys that start" if entries else "no entry has a key that starts"
            raise ValueError(f"{fault} with {key!r} in {os.fspath(root)!r}; pass one of: {known}")
    for entry in entries:
        _remove(folder_of(root, entry.key))
    return sum(entry.num_bytes for entry in entries)


def folder_of(root: str | os.PathLike[str], key: str) -> str:
    return storage.join(storage.normalize(root), key[:KEY_DIGITS])


def begin(root: str | os.PathLike[str], key: str) -> str:
    """Creates an entry's folder with its marker file. Returns the name of a new run folder."""
    storage.write_atomic(storage.join(folder_of(root, key), MARKER_NAME), key.encode())
    return f"run-{uuid.uuid4().hex[:12]}"


def publish(root: str | os.PathLike[str], entry: CacheEntry, manifest: ShardManifest) -> None:
    """Commits an entry whose shards are complete; replaces an older entry with the same key."""
    folder = folder_of(root, entry.key)
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


def abandon(root: str | os.PathLike[str], key: str, run: str) -> None:
    folder = folder_of(root, key)
    remove_folder(storage.join(folder, run), SHARD_PATHS)
    if storage.list_names(folder) == [MARKER_NAME]:
        _remove(folder)


def load_entry(folder: str) -> CacheEntry | None:
    try:
        entry = record(CacheEntry, parse_object(storage.read_bytes(storage.join(folder, ENTRY_NAME))))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    names_match = entry.key.startswith(folder.rpartition("/")[2]) and _RUN.fullmatch(entry.run)
    return entry if names_match else None


def _describe_folder(folder: str) -> CachedShards | None:
    names = storage.list_names(folder)
    entry = load_entry(folder) if ENTRY_NAME in names else None
    if entry is None and MARKER_NAME not in names:
        return None
    num_bytes = sum(_bytes_below(storage.join(folder, name)) for name in names if _is_ours(name))
    if entry is None:
        return CachedShards(
            key=folder.rpartition("/")[2],
            uri=folder,
            created="",
            rows=0,
            num_bytes=num_bytes,
            columns=(),
            plan="unfinished: being written, or interrupted",
            is_reusable=False,
        )
    return CachedShards(
        key=entry.key,
        uri=storage.join(folder, entry.run),
        created=entry.created,
        rows=entry.rows,
        num_bytes=num_bytes,
        columns=entry.columns,
        plan=entry.plan_summary if entry.refusal is None else f"not reused: {entry.refusal}",
        is_reusable=entry.refusal is None,
    )


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
