"""Entries of a manifest about an external table, which is read in place, and the states of its files.

A state changes whenever the content of a file may have changed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple
from urllib.parse import unquote

import pyarrow.parquet as pq

from ringspark.pipelines import storage

# Names of a content's identity or time in object stores and HDFS; `size` alone proves nothing.
_MARKS = (
    "etag", "checksum", "md5hash", "md5", "content_md5", "crc32c", "generation", "version_id", "versionid",
    "mtime", "modified", "last_modified", "lastmodified", "modification_time", "modificationtime", "updated",
    "created",
)  # fmt: skip
_MAX_THREADS = 16

TABLE_REMEDY = "do not change a table while it is read; train again, or train on shards from write_shards"

FileState = tuple[str, int, str]
Number = bool | int | float


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


FILE, ROW, NUM_BYTES = "__ringspark_file", "__ringspark_row", "__ringspark_bytes"
"""Columns of a reference: the row's file with the file's state, its number there, and its bytes in a shard.

The bytes determine the row groups, so that a later copy of the references makes the same ones.
"""


class Window(NamedTuple):
    """Rows `start` to `stop` of a row group, which a reader reads at once and shuffles together."""

    row_group: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class TableSource:
    """The external table that a manifest describes; `version` is set for Delta and Iceberg.

    `schema_id` is the schema of an Iceberg table whose names the columns have.
    """

    uri: str
    format: str = "parquet"
    version: int | None = None
    schema_id: int | None = None


class InPlaceError(ValueError):
    """The rows of a DataFrame cannot be read from the files below it."""


class RowsDifferError(InPlaceError):
    """Arrow cannot read a file, or reads other values from it than Spark."""


@dataclass(frozen=True, kw_only=True)
class FileColumn:
    """Name of a column in a table's files, and the Spark types to which its values are cast, in order.

    A column with a field ID may have another name in each file. `fields` has the fields of a struct, by their
    names in Spark; it is empty if the files have the same names.
    """

    name: str
    casts: tuple[str, ...] = ()
    field_id: int | None = None
    fields: dict[str, FileColumn] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TableFile:
    """Properties of an external table's file.

    Attributes:
        state: Time, version or checksum of the file, as its store reports it.
        window_rows: Rows per window; 0 reads every row group whole.
        values: Value of each partition column for this file, by column name.
    """

    state: str
    window_rows: int
    values: dict[str, Number]

    def __post_init__(self) -> None:
        if self.window_rows < 0:
            raise ValueError(f"window_rows must not be negative, got {self.window_rows}")

    @property
    def most_rows(self) -> int:
        """Largest number of rows that readers accept; it limits the number of windows, which take memory."""
        return (self.window_rows << 27) or (1 << 62)

    def windows(self, row_groups: Sequence[int]) -> tuple[Window, ...]:
        """Splits row groups of these sizes into windows; one below 2 * `window_rows` rows is one window."""
        size = self.window_rows
        return tuple(
            Window(group, start, min(start + step, rows))
            for group, rows in enumerate(row_groups)
            for step in (size if size and rows >= 2 * size else max(1, rows),)
            for start in range(0, max(1, rows), step)
        )


def in_place(module: str) -> Any:
    """Imports a module of `ringspark.extras` that reads external tables in place, at its first use."""
    return import_module(f"ringspark.extras.external_tables.in_place.{module}")


def describe_file(uri: str) -> str:
    """Returns the value of `FILE` for a percent-encoded URI, as in Spark's `_metadata.file_path`."""
    ((path, num_bytes, state),) = path_states([storage.normalize(unquote(uri))])
    return f"{num_bytes} {state}\n{path}"


def parse_file(text: str) -> FileState:
    """Returns the file and its state from a value of `FILE`."""
    state, _, path = text.partition("\n")
    num_bytes, _, marks = state.partition(" ")
    return path, int(num_bytes), marks


def list_files(uri: str) -> set[FileState]:
    """Returns the files to which a shard of references refers, as they were when it was written."""
    with storage.store_errors(uri), storage.open_file(uri) as source:
        batches = pq.ParquetFile(source, read_dictionary=[FILE]).iter_batches(columns=[FILE])
        return {parse_file(text) for batch in batches for text in batch.column(0).unique().to_pylist()}


def changed_problem(files: Sequence[FileState]) -> str | None:
    """Returns a sentence about the first file that differs from its manifest; None if no file does.

    `files` are (URI, number of bytes, state), as in the manifest. Raises OSError if a file cannot be reached.
    """
    for (uri, *known), (_, *now) in zip(files, path_states([uri for uri, _, _ in files]), strict=True):
        if known != now:
            return f"{uri!r} has changed since the training listed its table"
    return None
