"""The manifest: what a set of shards is, and the only thing a reader accepts.

`manifest.json` is written last and atomically, so its presence is the commit:
files without one are an unfinished write, files it does not name do not exist
as far as a reader is concerned. Row counts live nowhere else, so they cannot
outlive the data they count.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from ringspark.pipelines import storage
from ringspark.pipelines.columns import Column
from ringspark.pipelines.stats import ColumnStats

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = get_args(Split)


@dataclass(frozen=True, kw_only=True)
class ShardFile:
    """One Parquet file.

    Attributes:
        path: Relative to the manifest's folder.
        split: "train" or "validation".
        num_bytes: Size of the file.
        row_groups: Rows of each row group, in order.
    """

    path: str
    split: Split
    num_bytes: int
    row_groups: tuple[int, ...]

    def __post_init__(self) -> None:
        leaves = ".." in self.path.split("/") or self.path.startswith("/")
        if not self.path or leaves or any(mark in self.path for mark in ("://", "::", "\\")):
            raise ValueError(f"a manifest may only name files in its own folder, got {self.path!r}")
        if self.split not in SPLITS:
            raise ValueError(
                f"file {self.path!r} has an unknown split {self.split!r}; known: {', '.join(SPLITS)}"
            )

    @property
    def num_rows(self) -> int:
        """Rows in the file."""
        return sum(self.row_groups)


@dataclass(frozen=True, kw_only=True)
class ShardManifest:
    """Files, row groups, columns and statistics of one set of shards.

    A manifest from `select` is a view with the files of one split only.

    Attributes:
        uri: The folder, absolute.
        columns: What a batch holds, in the order of the DataFrame.
        files: The Parquet files in reading order.
        stats: Split -> column name -> statistics.
        format_version: Version of the JSON layout.
    """

    uri: str
    columns: tuple[Column, ...]
    files: tuple[ShardFile, ...]
    stats: dict[str, dict[str, ColumnStats]] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    @property
    def schema(self) -> tuple[Column, ...]:
        """The columns."""
        return self.columns

    @property
    def row_groups(self) -> tuple[int, ...]:
        """Rows of every row group, over the files in order: what `plan_epoch` takes."""
        return tuple(rows for file in self.files for rows in file.row_groups)

    @property
    def num_rows(self) -> int:
        """Rows in all files of this manifest or view."""
        return sum(file.num_rows for file in self.files)

    def column(self, name: str) -> Column:
        """Returns the column called `name`; ValueError naming the known ones otherwise."""
        for column in self.columns:
            if column.name == name:
                return column
        known = ", ".join(column.name for column in self.columns)
        raise ValueError(f"the shards in {self.uri!r} have no column {name!r}; known: {known}")

    def select(self, split: Split) -> ShardManifest:
        """Returns a view with the files and statistics of one split; it may hold no rows."""
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
        files = tuple(file for file in self.files if file.split == split)
        return replace(self, files=files, stats={key: val for key, val in self.stats.items() if key == split})

    def locate(self) -> tuple[tuple[ShardFile, int], ...]:
        """Returns (file, row group within the file) for every index into `row_groups`."""
        return tuple((file, group) for file in self.files for group in range(len(file.row_groups)))

    def describe(self) -> str:
        """Returns a short text table of splits, columns and their ranges."""
        lines = [
            f"{self.uri}: {self.num_rows} rows, {len(self.files)} files, {len(self.row_groups)} row groups"
        ]
        for split, columns in self.stats.items():
            for name, stats in columns.items():
                column = self.column(name)
                shape = f"[{column.length}]" if column.kind == "array" else ""
                mean = "none" if stats.mean is None else f"{stats.mean:.6g}"
                lines.append(
                    f"  {split} {name}: {column.dtype}{shape}, {stats.rows} rows, range {stats.minimum} to "
                    f"{stats.maximum}, mean {mean}, {stats.nans} NaN, {stats.infs} infinite"
                )
        return "\n".join(lines)

    def verify_files(self) -> None:
        """Checks every file's size and row groups against the manifest; reads footers only.

        Raises:
            ValueError: A file is missing or differs; names the file and the remedy.
        """
        if not self.files:
            return
        with ThreadPoolExecutor(max_workers=min(16, len(self.files))) as pool:
            for problem in pool.map(self._file_problem, self.files):
                if problem is not None:
                    raise ValueError(
                        f"{problem}; write the shards again with write_shards(..., overwrite=True)"
                    )

    def save(self) -> None:
        """Commits the manifest: writes it atomically into its folder."""
        assert self.files, "a manifest without files is never committed"
        storage.write_atomic(storage.join(self.uri, MANIFEST_NAME), self.to_json().encode())

    @staticmethod
    def load(uri: str | os.PathLike[str]) -> ShardManifest:
        """Reads the manifest of the folder `uri`. The folder may have moved since it was written.

        Raises:
            ValueError: There is no manifest, or one of a newer format, or one that is damaged.
        """
        folder = storage.normalize(uri)
        try:
            data = storage.read_bytes(storage.join(folder, MANIFEST_NAME))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ValueError(
                f"{folder!r} holds no shards (no {MANIFEST_NAME}: not written, or the write did not finish); "
                "write them with write_shards"
            ) from error
        return ShardManifest.from_json(data, folder)

    def to_json(self) -> str:
        """Returns the manifest as JSON text. The folder is not stored, so that it can be moved."""
        return json.dumps(
            {
                "format_version": self.format_version,
                "columns": [column.to_json() for column in self.columns],
                "files": [
                    {"path": f.path, "split": f.split, "num_bytes": f.num_bytes, "row_groups": f.row_groups}
                    for f in self.files
                ],
                "stats": {
                    split: {name: stats.to_json() for name, stats in columns.items()}
                    for split, columns in self.stats.items()
                },
            },
            indent=1,
        )

    @staticmethod
    def from_json(text: str | bytes, uri: str) -> ShardManifest:
        """Reads what `to_json` returned."""
        try:
            data = json.loads(text)
            version = int(data["format_version"])
            if version > FORMAT_VERSION:
                raise ValueError(
                    f"its format is {version}, this ringspark reads up to {FORMAT_VERSION}; upgrade ringspark"
                )
            return ShardManifest(
                uri=uri,
                columns=tuple(Column.from_json(column) for column in data["columns"]),
                files=tuple(
                    ShardFile(
                        path=file["path"],
                        split=file["split"],
                        num_bytes=int(file["num_bytes"]),
                        row_groups=tuple(int(rows) for rows in file["row_groups"]),
                    )
                    for file in data["files"]
                ),
                stats={
                    split: {name: ColumnStats.from_json(stats) for name, stats in columns.items()}
                    for split, columns in data["stats"].items()
                },
                format_version=version,
            )
        except (KeyError, TypeError, ValueError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"the manifest in {uri!r} cannot be used: {reason}") from error

    def _file_problem(self, file: ShardFile) -> str | None:
        uri = storage.join(self.uri, file.path)
        try:
            num_bytes = storage.size(uri)
            if num_bytes != file.num_bytes:
                return f"shard file {uri!r} has {num_bytes} bytes where the manifest says {file.num_bytes}"
            with storage.open_file(uri) as source:
                metadata = pq.ParquetFile(source).metadata
        except FileNotFoundError:
            return f"shard file {uri!r} is missing"
        except (OSError, pa.ArrowException) as error:
            return f"shard file {uri!r} cannot be read ({error})"
        row_groups = tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
        if row_groups != file.row_groups:
            found, recorded = _shorten(row_groups), _shorten(file.row_groups)
            return f"shard file {uri!r} has row groups {found} where the manifest says {recorded}"
        return None


def _shorten(row_groups: tuple[int, ...]) -> str:
    return str(row_groups) if len(row_groups) <= 4 else f"{len(row_groups)} groups of {sum(row_groups)} rows"
