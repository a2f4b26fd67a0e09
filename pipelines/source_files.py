"""Reads the state of source files. The state changes whenever a file's content may have changed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ringspark.pipelines import storage

# Names of a content's identity or time in object stores and HDFS; `size` alone proves nothing.
_MARKS = (
    "etag", "checksum", "md5hash", "md5", "content_md5", "crc32c", "generation", "version_id", "versionid",
    "mtime", "modified", "last_modified", "lastmodified", "modification_time", "modificationtime", "updated",
    "created",
)  # fmt: skip
_MAX_THREADS = 16

FileState = tuple[str, int, str]


def path_states(paths: Sequence[str]) -> tuple[FileState, ...]:
    """Returns (path, number of bytes, state) of every file. Runs on the driver.

    Raises:
        OSError: A file cannot be reached.
        ValueError: The store reports neither a checksum nor a time nor a version of a file.
    """
    remote = [path for path in paths if not storage.is_local(path)]
    for scheme in {path.partition("://")[0]: path for path in remote}.values():
        # fsspec caches listings, which would show the old state of a replaced file.
        storage.filesystem(scheme)[0].invalidate_cache()
    if not paths:
        return ()
    with ThreadPoolExecutor(min(_MAX_THREADS, len(paths)), thread_name_prefix="ringspark-stat") as pool:
        return tuple(pool.map(_file_state, paths))


def _file_state(path: str) -> FileState:
    if storage.is_local(path):
        stat = os.stat(path)
        return path, stat.st_size, f"mtime_ns={stat.st_mtime_ns} ctime_ns={stat.st_ctime_ns}"
    fs, inner = storage.filesystem(path)
    info: dict[str, Any] = fs.info(inner)
    known = {key.lower().replace("-", "_"): value for key, value in info.items()}
    marks = [f"{mark}={known[mark]}" for mark in _MARKS if known.get(mark) is not None]
    if not marks:
        raise ValueError(f"the storage of {path!r} reports no checksum or time of files; use another store")
    return path, int(info["size"]), " ".join(marks)
