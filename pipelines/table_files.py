"""What a manifest says of a table that another writer made and that is read where it lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ringspark.pipelines.reuse.source_files import FileState, path_states

TABLE_REMEDY = "a table must stay as it is while it is read: train anew, or on shards of write_shards"

Number = bool | int | float


class Window(NamedTuple):
    """Rows `start` to `stop` of a row group, which are read and shuffled together."""

    row_group: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class TableSource:
    """The table that a manifest describes.

    Attributes:
        uri: Folder that the files' paths start from.
        format: "parquet" or "delta".
        version: Version of a Delta table.
    """

    uri: str
    format: str = "parquet"
    version: int | None = None


@dataclass(frozen=True, kw_only=True)
class TableFile:
    """What is known of a table's file beside its rows.

    Attributes:
        state: Time, version or checksum of the file, as its file system or store tells it.
        window_rows: Rows of a window; 0 reads every row group whole.
        values: Column name -> the number that all rows have, of columns that are folders' names.
    """

    state: str
    window_rows: int
    values: dict[str, Number]

    def __post_init__(self) -> None:
        if self.window_rows < 0:
            raise ValueError(f"window_rows must not be negative, got {self.window_rows}")

    @property
    def most_rows(self) -> int:
        """Rows of the largest file that readers take: each window takes memory in their plans."""
        return (self.window_rows << 27) or (1 << 62)

    def windows(self, row_groups: Sequence[int]) -> tuple[Window, ...]:
        """Cuts row groups of these sizes, if they have twice the rows of a window or more."""
        size = self.window_rows
        return tuple(
            Window(group, start, min(start + step, rows))
            for group, rows in enumerate(row_groups)
            for step in (size if size and rows >= 2 * size else max(1, rows),)
            for start in range(0, max(1, rows), step)
        )


def changed_problem(files: Sequence[FileState]) -> str | None:
    """Says which of a table's files is not the one that its manifest describes; None if all are.

    Args:
        files: (URI, bytes, state) of files, as the manifest has them.

    Raises:
        OSError: The file is missing or cannot be reached.
    """
    for (uri, *known), (_, *now) in zip(files, path_states([uri for uri, _, _ in files]), strict=True):
        if known != now:
            return f"{uri!r} has changed since the training looked at its table"
    return None
