from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ringspark.pipelines import Column
from ringspark.pipelines.shard_writer import WritePlan, write_partition

X = Column(name="x", kind="scalar", dtype="int64")


def _plan(folder: Path, columns: tuple[Column, ...] = (X,), **changes: Any) -> WritePlan:
    settings: dict[str, Any] = {"validation_col": None, "row_group_rows": 10, "compression": "zstd"} | changes
    return WritePlan(uri=str(folder), run_id="run", columns=columns, **settings)


def _write(plan: WritePlan, batches: list[Any]) -> dict[str, Any]:
    (report,) = write_partition(plan, iter(batches))
    loaded: dict[str, Any] = json.loads(report.column(0)[0].as_py())
    return loaded


def _batch(*arrays: Any) -> Any:
    return pa.RecordBatch.from_arrays(
        [pa.array(a) for a in arrays], names=[f"c{i}" for i in range(len(arrays))]
    )


@pytest.mark.parametrize("batch_rows", [1, 3, 7, 10, 25, 100])
def test_row_groups_have_exactly_the_rows_asked_for(tmp_path: Path, batch_rows: int) -> None:
    values = np.arange(47)
    batches = [_batch(values[start : start + batch_rows]) for start in range(0, 47, batch_rows)]
    (file,) = _write(_plan(tmp_path), batches)["files"]
    assert file["row_groups"] == [10, 10, 10, 10, 7]
    assert file["num_bytes"] == (tmp_path / file["path"]).stat().st_size
    stored = pq.ParquetFile(tmp_path / file["path"])
    assert [stored.metadata.row_group(i).num_rows for i in range(5)] == file["row_groups"]
    assert stored.read()["x"].to_pylist() == values.tolist()


@pytest.mark.parametrize("batch_rows", [5, 10, 20, 40])
def test_rows_that_fill_the_last_row_group_leave_no_rest(tmp_path: Path, batch_rows: int) -> None:
    batches = [_batch(np.arange(batch_rows)) for _ in range(40 // batch_rows)]
    (file,) = _write(_plan(tmp_path), batches)["files"]
    assert file["row_groups"] == [10] * 4


def test_no_rows_make_no_file(tmp_path: Path) -> None:
    report = _write(_plan(tmp_path), [_batch(np.zeros(0, dtype=np.int64))])
    assert report["files"] == []
    assert list(tmp_path.iterdir()) == []
    assert _write(_plan(tmp_path), [])["stats"]["train"]["x"]["rows"] == 0


def test_the_last_column_parts_train_from_validation(tmp_path: Path) -> None:
    for indicator in (np.arange(40) % 4 == 0, (np.arange(40) % 4 == 0).astype(np.float64)):
        report = _write(_plan(tmp_path, validation_col="held_out"), [_batch(np.arange(40), indicator)])
        rows = {
            file["split"]: pq.read_table(tmp_path / file["path"])["x"].to_pylist() for file in report["files"]
        }
        assert rows["validation"] == list(range(0, 40, 4))
        assert sorted(rows["train"] + rows["validation"]) == list(range(40))
        assert report["stats"]["validation"]["x"]["rows"] == 10
        assert pq.read_schema(tmp_path / report["files"][0]["path"]).names == ["x"]


def test_wide_rows_get_smaller_row_groups(tmp_path: Path) -> None:
    wide = Column(name="x", kind="array", dtype="float32")
    values = pa.ListArray.from_arrays(
        np.arange(0, 51 * 40_000, 40_000, dtype=np.int32), np.zeros(2_000_000, np.float32)
    )
    (file,) = _write(_plan(tmp_path, (wide,), row_group_rows=None), [_batch(values)])["files"]
    # 160 kB a row, 4 MiB a group.
    assert file["row_groups"] == [26, 24]
    narrow = _write(_plan(tmp_path, row_group_rows=None), [_batch(np.arange(20_000))])
    assert narrow["files"][0]["row_groups"] == [16_384, 3_616]


@pytest.mark.parametrize(
    "bad", [pa.array([[1.0], None]), pa.array([[1.0], [None]]), pa.array([[1.0], [1.0, 2.0]])], ids=str
)
def test_data_that_will_be_refused_is_counted_and_not_kept(tmp_path: Path, bad: Any) -> None:
    column = Column(name="x", kind="array", dtype="float64")
    good = pa.array([[1.0]] * 30)
    report = _write(_plan(tmp_path, (column,)), [_batch(good), _batch(bad), _batch(good)])
    assert report["files"] == []
    assert report["stats"]["train"]["x"]["rows"] == 62
    assert list(tmp_path.iterdir()) == []


def test_an_error_leaves_no_file(tmp_path: Path) -> None:
    def batches() -> Iterator[Any]:
        yield _batch(np.arange(100))
        assert list(tmp_path.iterdir())
        raise RuntimeError("the plan failed")

    with pytest.raises(RuntimeError, match="the plan failed"):
        list(write_partition(_plan(tmp_path), batches()))
    assert list(tmp_path.iterdir()) == []


def test_attempts_of_one_task_write_under_different_names(tmp_path: Path) -> None:
    names = {_write(_plan(tmp_path), [_batch(np.arange(3))])["files"][0]["path"] for _ in range(3)}
    assert len(names) == 3
    assert all(name.startswith("part-00000-run-") for name in names)
