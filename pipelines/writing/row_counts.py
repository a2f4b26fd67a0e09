"""The equation of a write: rows in the files = rows in the statistics = rows read - rows skipped by rule.

`write_shards` checks it before the commit. Lost rows would otherwise train a worse model without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ringspark.pipelines.manifest import SPLITS, ShardFile, ShardManifest


class LostRowsError(RuntimeError):
    """A write has lost or doubled rows. Nothing was committed."""


def check_tasks(reports: Sequence[Mapping[str, Any]]) -> None:
    """Raises LostRowsError if two tasks have the same number or wrote the same file, or a task is missing."""
    tasks = sorted(report["task"] for report in reports)
    if tasks != list(range(len(tasks))):
        raise _error(f"the reports come from the tasks {_shorten(tasks)}, not once from each task")
    paths = [file["path"] for report in reports for file in report["files"]]
    if len(set(paths)) < len(paths):
        raise _error(f"two tasks wrote the file {max(paths, key=paths.count)!r}")


def check_copies(old: Sequence[ShardFile], new: Sequence[ShardFile], planned: Sequence[int]) -> None:
    """Compares the files that a copy replaces with the files of the copy; `planned` has the rows of each."""
    rows, copied = sum(file.num_rows for file in old), sum(file.num_rows for file in new)
    if rows != copied or [file.num_rows for file in new] != list(planned):
        raise _error(f"of {rows} rows in the first files, {copied} are in their copies")


def check_rows(manifest: ShardManifest, reports: Sequence[Mapping[str, Any]]) -> None:
    """Compares the rows of a complete manifest with the rows that the tasks read and skipped."""
    read, skipped = (sum(report[name] for report in reports) for name in ("rows", "skipped"))
    found = manifest.num_rows
    if found != read - skipped or manifest.skipped_rows != skipped:
        raise _error(f"the tasks read {read} rows and skipped {skipped}, but {found} rows are in the files")
    for split in SPLITS:
        rows = manifest.select(split).num_rows
        for name, stats in manifest.stats.get(split, {}).items():
            if stats.rows != rows:
                raise _error(f"the {split} files hold {rows} rows, but column {name!r} counts {stats.rows}")


def check_split(manifest: ShardManifest, num_rows: int) -> None:
    """Compares the rows of one side of a split with their number when the rows were split."""
    found = manifest.num_rows + manifest.skipped_rows
    if found != num_rows:
        raise LostRowsError(
            f"{num_rows} rows were to be trained on, but {found} were written: the DataFrame gave other rows "
            "in another job; give df.localCheckpoint() instead"
        )


def _error(what: str) -> LostRowsError:
    return LostRowsError(
        f"the write lost or doubled rows: {what}; nothing was trained. This is a bug of ringspark: report it "
        "with the output of df.explain('extended'); until it is mended, use df.localCheckpoint() instead"
    )


def _shorten(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown if len(numbers) <= 8 else f"{shown} and {len(numbers) - 8} more"
