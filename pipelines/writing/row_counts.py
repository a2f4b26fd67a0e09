"""The equation of a write: rows in the files = rows in the statistics = rows read - rows skipped by rule.

`write_shards` checks it before the commit. Lost rows would silently train a worse model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ringspark.pipelines.manifest import SPLITS, ShardFile, ShardManifest


class LostRowsError(RuntimeError):
    """The rows written are not the rows that were read."""


def check_tasks(reports: Sequence[Mapping[str, Any]]) -> None:
    """Raises LostRowsError if two tasks wrote the same file, or the task numbers repeat or have a gap."""
    tasks = sorted(report["task"] for report in reports)
    if tasks != list(range(len(tasks))):
        raise _error(f"the tasks report as {_shorten(tasks)}, expected 0 to {len(tasks) - 1}")
    paths = [file["path"] for report in reports for file in report["files"]]
    if len(set(paths)) < len(paths):
        raise _error(f"two tasks wrote the file {max(paths, key=paths.count)!r}")


def check_copies(old: Sequence[ShardFile], new: Sequence[ShardFile], planned: Sequence[int]) -> None:
    """Raises LostRowsError if a copy of files lost rows; `planned` has the rows of each new file."""
    rows, copied = sum(file.num_rows for file in old), sum(file.num_rows for file in new)
    if rows != copied or [file.num_rows for file in new] != list(planned):
        raise _error(f"of {rows} rows, {copied} are in the copies, or a copy has other rows than planned")


def check_rows(manifest: ShardManifest, reports: Sequence[Mapping[str, Any]]) -> None:
    """Raises LostRowsError unless the manifest counts the rows that the tasks read and did not skip."""
    read, skipped = (sum(report[name] for report in reports) for name in ("rows", "skipped"))
    found = manifest.num_rows
    if found != read - skipped or manifest.skipped_rows != skipped:
        raise _error(f"the tasks read {read} rows and skipped {skipped}, but {found} rows are in the files")
    for split in SPLITS:
        rows = manifest.select(split).num_rows
        for name, stats in manifest.stats.get(split, {}).items():
            if stats.rows != rows:
                raise _error(f"the {split} files hold {rows} rows, but column {name!r} counts {stats.rows}")


def _error(what: str) -> LostRowsError:
    return LostRowsError(
        f"the write lost or doubled rows: {what}; nothing was committed. This is a bug of ringspark: report "
        "it with the output of df.explain('extended'); until it is mended, use df.localCheckpoint() instead"
    )


def _shorten(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown if len(numbers) <= 8 else f"{shown} and {len(numbers) - 8} more"
