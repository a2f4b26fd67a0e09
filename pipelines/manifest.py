"""The manifest: describes a set of shards. Readers read only files that it names.

`manifest.json` is written last and atomically, so the shards are committed once it exists.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from importlib import import_module
from typing import Any, Literal, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from ringspark.pipelines import storage
from ringspark.pipelines.column_stats import ColumnStats
from ringspark.pipelines.columns import Column, check_names
from ringspark.pipelines.kinds.base import BatchArray
from ringspark.pipelines.notebook_table import align_table, notebook_table
from ringspark.pipelines.table_files import (
    TABLE_REMEDY,
    FileColumn,
    TableFile,
    TableSource,
    changed_problem,
    list_files,
)
from ringspark.pipelines.typed_json import record, versioned

FORMAT_VERSION = 3
_DATALOADER = "ringspark.extras.dataloader"
MANIFEST_NAME = "manifest.json"

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = get_args(Split)


@dataclass(frozen=True, kw_only=True)
class ShardFile:
    """One Parquet file.

    Attributes:
        path: Path relative to the manifest's folder.
        sha256: SHA-256 in hexadecimal. Empty for a file of an external table, which has a `state` instead.
        row_groups: Number of rows of each row group, in order.
        table: Further properties of a file of an external table; None for shards.
    """

    path: str
    split: Split
    num_bytes: int
    sha256: str
    row_groups: tuple[int, ...]
    table: TableFile | None = None

    def __post_init__(self) -> None:
        leaves = any(part in ("", ".", "..") for part in self.path.split("/"))
        if leaves or not self.path.isprintable() or any(mark in self.path for mark in ("://", "::", "\\")):
            raise ValueError(f"a manifest may only name files in its folder, got {self.path[:200]!r}")
        if self.num_bytes < 0 or any(rows < 0 for rows in self.row_groups):
            raise ValueError(f"file {self.path!r} has a negative size or number of rows")
        if self.table is not None and not 0 <= self.num_rows <= self.table.most_rows:
            raise ValueError(
                f"file {self.path!r} has {self.num_rows} rows, more than the {self.table.most_rows} that can "
                "be read from one file in place; write it as several files"
            )

    @property
    def num_rows(self) -> int:
        return sum(self.row_groups)

    @property
    def state(self) -> str:
        """Time, version or checksum of a file of an external table; empty for shards."""
        return "" if self.table is None else self.table.state

    @property
    def groups(self) -> tuple[int, ...]:
        """Number of rows of each group that is read at once. A group is a row group or a window of one."""
        if self.table is None:
            return self.row_groups
        return tuple(stop - start for _, start, stop in self.table.windows(self.row_groups))


@dataclass(frozen=True, kw_only=True)
class ShardManifest:
    """Files, row groups, columns and statistics of one set of shards.

    Attributes:
        uri: Absolute URI of the folder.
        columns: Columns of a batch, in the order of the DataFrame.
        files: Parquet files in reading order.
        stats: Statistics by split, then by column name.
        skipped_rows: Number of rows that were left out: they held a null or NaN, or could not be read.
        table: External table that the files belong to; None for shards of `write_shards`.
        file_columns: If the shards refer to rows of an external table, where its files hold these columns.
    """

    uri: str
    columns: tuple[Column, ...]
    files: tuple[ShardFile, ...]
    stats: dict[str, dict[str, ColumnStats]] = field(default_factory=dict)
    skipped_rows: int = 0
    table: TableSource | None = None
    file_columns: dict[str, FileColumn] | None = None
    format_version: int = FORMAT_VERSION

    @property
    def files_uri(self) -> str:
        return self.uri if self.table is None else self.table.uri

    @property
    def row_groups(self) -> tuple[int, ...]:
        """Number of rows of every group, in the order of the files, as `plan_epoch` takes it."""
        return tuple(rows for file in self.files for rows in file.groups)

    @property
    def num_rows(self) -> int:
        """Number of rows in all files."""
        return sum(file.num_rows for file in self.files)

    def _repr_html_(self) -> str:
        rows = []
        for column in self.columns:
            stats = self.stats.get("train", {}).get(column.name)
            numbers = ("", "", "") if stats is None else (stats.minimum, stats.maximum, stats.mean)
            shown = ("" if value is None else value for value in numbers)
            rows.append((column.name, column.kind, column.source, *shown))
        sizes = [
            f"{split}: {view.num_rows:,} rows in {len(view.files):,} files."
            for split, view in ((split, self.select(split)) for split in SPLITS)
            if view.files
        ]
        header = ["column", "in a batch", "Spark type", "min", "max", "mean"]
        return notebook_table(f"Shards in {self.uri}", header, rows, " ".join(sizes))

    def column_of(self, name: str) -> Column:
        """Returns the column that adds the array `name` to a batch, or raises ValueError."""
        return self._owners.get(name) or self.column(name)

    @cached_property
    def _by_name(self) -> dict[str, Column]:
        return {column.name: column for column in self.columns}

    @cached_property
    def _owners(self) -> dict[str, Column]:
        # The first column with an array of a name is its owner.
        return {name: c for c in reversed(self.columns) for name in c.kind.arrays(c.name)}

    def array(self, name: str) -> BatchArray:
        """Describes the array `name` of a batch. Raises ValueError if no such array has one entry per row."""
        array = self.described(name)
        if not array.per_row:
            raise self._no_array(name)
        return array

    def described(self, name: str) -> BatchArray:
        """Describes the array `name` of a batch, or raises ValueError if there is none."""
        column = self.column_of(name)
        array = column.kind.arrays(column.name).get(name)
        if array is None:
            raise self._no_array(name)
        return array

    def _no_array(self, name: str) -> ValueError:
        column = self.column_of(name).name
        return ValueError(f"column {column!r} of the shards at {self.uri} adds no array {name!r} to a batch")

    def column(self, name: str) -> Column:
        """Returns the column called `name`, or raises ValueError."""
        if column := self._by_name.get(name):
            return column
        known = ", ".join(self._by_name)
        raise ValueError(f"the shards in {self.uri!r} have no column {name!r}; known: {known}")

    def range_of(self, name: str) -> tuple[float, float] | None:
        """Returns the smallest and the largest number over all splits; None if they are unknown."""
        stats = self._stats_of(name)
        ranges = [(s.minimum, s.maximum) for s in stats if s.minimum is not None and s.maximum is not None]
        if not ranges or len(ranges) < sum(1 for s in stats if s.rows):
            return None
        return min(low for low, _ in ranges), max(high for _, high in ranges)

    def mean_row_bytes(self, column: Column) -> float:
        stats = self._stats_of(column.name)
        rows = sum(found.rows for found in stats)
        if not column.kind.value_bytes or not rows:
            return column.kind.row_bytes
        return sum(found.values for found in stats) * column.kind.value_bytes / rows

    def _stats_of(self, name: str) -> list[ColumnStats]:
        return [columns[name] for columns in self.stats.values() if name in columns]

    def select(self, split: Split) -> ShardManifest:
        """Returns a manifest with only the files and statistics of one split."""
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
        files = tuple(file for file in self.files if file.split == split)
        return replace(self, files=files, stats={key: val for key, val in self.stats.items() if key == split})

    def to_dataloader(self, batch_size: int, **options: Any) -> Any:
        """Returns an iterable over batches of torch tensors for a training loop of your own.

        `ringspark.extras.dataloader.to_dataloader` describes the options.
        """
        return import_module(_DATALOADER).to_dataloader(self, batch_size, **options)

    def locate(self) -> tuple[tuple[ShardFile, int], ...]:
        """Returns, for every index into `row_groups`, the file and the number of the group within it."""
        return tuple((file, group) for file in self.files for group in range(len(file.groups)))

    @property
    def paths(self) -> tuple[str, ...]:
        """URIs of the Parquet files, for other tools."""
        return tuple(storage.join(self.files_uri, file.path) for file in self.files)

    def describe(self) -> str:
        """Returns a text table with one line per split and column."""
        skipped = f", {self.skipped_rows:,} rows skipped" if self.skipped_rows else ""
        title = (
            f"{self.uri}: {self.num_rows:,} rows, {len(self.files)} files, "
            f"{len(self.row_groups)} row groups, "
            f"{sum(file.num_bytes for file in self.files):,} bytes{skipped}"
        )
        header = ("split", "column", "in a batch", "rows", "nulls", "min", "max", "mean", "std")
        rows = [
            (split, name, str(self.column(name).kind), *_cells(stats))
            for split, columns in self.stats.items()
            for name, stats in columns.items()
        ]
        return f"{title}\n{align_table(header, rows, num_left=3)}"

    def verify_files(self) -> None:
        """Compares every file's footer with the manifest.

        Raises ValueError if a file is missing or differs.
        """
        self._check_files(self._footer_problem)

    def verify(self) -> None:
        """Reads every file completely.

        Raises ValueError if a file is missing or differs from the manifest.
        """
        self._check_files(lambda file: self._footer_problem(file) or self._digest_problem(file))

    def save(self, *, overwrite: bool = True) -> None:
        """Writes the manifest atomically into its folder, which commits the shards.

        Raises FileExistsError if the folder has a manifest and `overwrite` is false.
        """
        assert self.files, "a manifest without files is never committed"
        uri = storage.join(self.uri, MANIFEST_NAME)
        storage.write_atomic(uri, self.to_json().encode(), overwrite=overwrite)

    @staticmethod
    def load(uri: str | os.PathLike[str]) -> ShardManifest:
        """Reads the manifest in the folder `uri`. The folder may have moved since it was written.

        A path without a scheme is on the local disk. Raises ValueError if the manifest is missing or damaged.
        """
        folder = storage.normalize(uri)
        try:
            data = storage.read_bytes(storage.join(folder, MANIFEST_NAME))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ValueError(
                f"{folder!r} holds no shards (no {MANIFEST_NAME}: not written, or the write did not finish); "
                "write them with write_shards"
            ) from error
        manifest = ShardManifest.from_json(data, folder)
        for file in manifest.files if manifest.table is None else ():
            storage.check_inside(folder, file.path)
        # For Spark, the path without a scheme may be another place.
        return replace(manifest, uri=f"file://{folder}") if os.fspath(uri).startswith("file:") else manifest

    def to_json(self) -> str:
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "uri"}
        values["columns"] = [column.to_json() for column in self.columns]
        return json.dumps(values, default=vars, indent=1, allow_nan=False)

    @staticmethod
    def from_json(text: str | bytes, uri: str) -> ShardManifest:
        try:
            manifest = record(ShardManifest, versioned(text, FORMAT_VERSION) | {"uri": uri})
            _check_consistent(manifest)
            return manifest
        except ValueError as error:
            remedy = "" if "; " in str(error) else "; write the shards again"
            raise ValueError(f"the manifest in {uri!r} cannot be used: {error}{remedy}") from error

    def _check_files(self, problem_of: Callable[[ShardFile], str | None]) -> None:
        if not self.files:
            return
        with ThreadPoolExecutor(max_workers=min(16, len(self.files))) as pool:
            problems = [problem for problem in pool.map(problem_of, self.files) if problem is not None]
        if problems:
            more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
            remedy = "write the shards again with write_shards(..., overwrite=True)"
            is_table = self.table is not None or self.file_columns is not None
            remedy = TABLE_REMEDY if is_table else remedy
            raise ValueError(f"{'; '.join(problems[:3])}{more}; {remedy}")

    def _footer_problem(self, file: ShardFile) -> str | None:
        uri = storage.join(self.files_uri, file.path)
        try:
            if file.table is not None:
                return changed_problem([(uri, file.num_bytes, file.state)])
            num_bytes = storage.size(uri)
            if num_bytes != file.num_bytes:
                return f"shard file {uri!r} has {num_bytes} bytes, but the manifest says {file.num_bytes}"
            with storage.store_errors(uri), storage.open_file(uri) as source:
                metadata = pq.ParquetFile(source).metadata
        except FileNotFoundError:
            return f"shard file {uri!r} is missing"
        except (OSError, pa.ArrowException) as error:
            return f"shard file {uri!r} cannot be read ({error})"
        problem = row_group_problem(file, metadata)
        if problem is None and self.file_columns is not None:
            try:
                return changed_problem(sorted(list_files(uri)))
            except OSError as error:
                return f"a file of the table cannot be reached ({error})"
        return None if problem is None else f"shard file {uri!r} {problem}"

    def _digest_problem(self, file: ShardFile) -> str | None:
        if file.table is not None:
            return None  # has no digest; its state was compared
        uri = storage.join(self.files_uri, file.path)
        try:
            found = storage.sha256(uri)
        except OSError as error:
            return f"shard file {uri!r} cannot be read ({error})"
        if found != file.sha256:
            return f"shard file {uri!r} differs from the bytes that were written"
        return None


def _check_consistent(manifest: ShardManifest) -> None:
    paths = [file.path for file in manifest.files]
    if not paths:
        raise ValueError("it names no files")
    if len(set(paths)) < len(paths):
        raise ValueError(f"it names {max(paths, key=paths.count)!r} twice")
    check_names([column.name for column in manifest.columns])
    for split, columns in manifest.stats.items():
        if split not in SPLITS:
            raise ValueError(f"it has statistics of an unknown split {split!r}")
        for name in columns:
            manifest.column(name)


def row_group_problem(file: ShardFile, metadata: Any) -> str | None:
    """Returns a clause that says how a Parquet footer differs from the manifest; None if it is equal."""
    row_groups = tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
    if row_groups == file.row_groups:
        return None
    return f"has row groups {_shorten(row_groups)}, but the manifest says {_shorten(file.row_groups)}"


def _shorten(row_groups: tuple[int, ...]) -> str:
    return str(row_groups) if len(row_groups) <= 4 else f"{len(row_groups)} groups of {sum(row_groups)} rows"


def _cells(stats: ColumnStats) -> tuple[str, ...]:
    numbers = (stats.minimum, stats.maximum, stats.mean, stats.std)
    odd = [f"{count:,} {name}" for count, name in ((stats.nans, "NaN"), (stats.infs, "inf")) if count]
    return f"{stats.rows:,}", ", ".join([f"{stats.nulls:,}", *odd]), *map(_number, numbers)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
