"""A write that loses or doubles rows fails, commits nothing and leaves nothing behind."""

import os
from dataclasses import replace
from typing import Any

import pytest

from ringspark.pipelines import ShardManifest, write_shards
from ringspark.pipelines.column_stats import ColumnStats
from ringspark.pipelines.manifest import ShardFile
from ringspark.pipelines.writing import rebalance, shards
from ringspark.pipelines.writing.row_counts import LostRowsError, check_copies, check_rows, check_tasks


def file(path: str, rows: int) -> ShardFile:
    return ShardFile(path=path, split="train", num_bytes=1, sha256="", row_groups=(rows,))


def report(task: int, rows: int = 10, skipped: int = 0) -> dict[str, Any]:
    return {"task": task, "rows": rows, "skipped": skipped, "files": [{"path": f"f{task}"}]}


def manifest(rows: int, counted: int, skipped: int) -> ShardManifest:
    stats = {"train": {"x": ColumnStats(rows=counted)}}
    return ShardManifest(uri="/s", columns=(), files=(file("f", rows),), stats=stats, skipped_rows=skipped)


READ = [report(0, rows=10, skipped=3), report(1, rows=5)]
LOST = [
    (check_tasks, [[report(0), report(0)]], "the tasks report as 0, 0, expected 0 to 1"),
    (check_tasks, [[report(2), report(0)]], "the tasks report as 0, 2, expected 0 to 1"),
    (check_tasks, [[report(0), report(1) | {"files": [{"path": "f0"}]}]], "two tasks wrote the file 'f0'"),
    (check_rows, [manifest(11, 12, 3), READ], "read 15 rows and skipped 3, but 11 rows are in the files"),
    (check_rows, [manifest(12, 13, 3), READ], "train files hold 12 rows, but column 'x' counts 13"),
    (check_copies, [[file("a", 7)], [file("b", 4), file("c", 4)], [4, 4]], "of 7 rows, 8 are in the copies"),
    (check_copies, [[file("a", 7)], [file("b", 3), file("c", 4)], [4, 3]], "of 7 rows"),
]


@pytest.mark.parametrize(("check", "arguments", "message"), LOST)
def test_rows_that_are_lost_or_doubled_are_counted(check: Any, arguments: list[Any], message: str) -> None:
    with pytest.raises(LostRowsError, match=message):
        check(*arguments)


def test_a_write_that_kept_all_rows_passes() -> None:
    check_tasks([report(1), report(0)])
    check_rows(manifest(12, 12, 3), READ)
    check_copies([file("a", 7)], [file("b", 4), file("c", 3)], [4, 3])


@pytest.mark.spark
@pytest.mark.parametrize("fault", ["a copy leaves rows out", "a task loses its rows"])
def test_a_write_that_loses_rows_leaves_nothing(spark, tmp_path, monkeypatch, fault):
    def half(*arguments: Any) -> Any:
        return [part[:1] for part in rebalance.plan_even_files(*arguments)][:1]

    def without_last(plan: Any, reports: Any, files: Any) -> Any:
        return replace(join(plan, reports, files), files=tuple(files[:-1]))

    join = shards.join_reports
    if fault == "a copy leaves rows out":
        monkeypatch.setattr(shards, "plan_even_files", half)
    else:
        monkeypatch.setattr(shards, "join_reports", without_last)
    with pytest.raises(LostRowsError, match=r"lost or doubled rows: .*; nothing was committed\. This"):
        write_shards(spark.range(100), str(tmp_path / "s"), num_files=3)
    assert os.listdir(tmp_path) == []
