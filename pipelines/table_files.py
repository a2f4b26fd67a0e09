"""Entries of a manifest about an external table, which is read in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple
from urllib.parse import unquote

import pyarrow.parquet as pq

from ringspark.pipelines import storage
from ringspark.pipelines.source_files import FileState, path_states

TABLE_REMEDY = "do not change a table while it is read; train again, or train on shards from write_shards"

Number = bool | int | float

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
