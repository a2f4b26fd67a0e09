import hashlib
import json
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ringspark.pipelines import Array, Column, Padded, Scalar
from ringspark.pipelines.writing.shard_writer import WritePlan, write_partition

X = Column(name="x", kind=Scalar("int64"))


def _plan(folder: Path, columns: tuple[Column, ...] = (X,), **changes: Any) -> WritePlan:
    settings: dict[str, Any] = {"handle_invalid": ("error",) * len(columns), "row_group_rows": 10} | changes
    return WritePlan(uri=str(folder.parent), folder=folder.name, columns=columns, **settings)


def _write(plan: WritePlan, *batches: Any) -> dict[str, Any]:
    (report,) = write_partition(plan, iter(batches))
    return json.loads(report.column(0)[0].as_py())


def _stored(plan: WritePlan, report: dict[str, Any], split: str = "train") -> Any:
    (file,) = (file for file in report["files"] if file["split"] == split)
    return pq.ParquetFile(Path(plan.uri) / file["path"])


def _batch(*arrays: Any) -> Any:
    names = [f"c{i}" for i in range(len(arrays))]
    return pa.RecordBatch.from_arrays([pa.array(a) for a in arrays], names=names)


@pytest.mark.parametrize("batch_rows", [1, 3, 7, 10, 25, 100])
def test_row_groups_have_exactly_the_rows_asked_for(tmp_path: Path, batch_rows: int) -> None:
    values = np.arange(47)
    batches = [_batch(values[start : start + batch_rows]) for start in range(0, 47, batch_rows)]
    plan = _plan(tmp_path)
    report = _write(plan, *batches)
    (file,) = report["files"]
    assert file["row_groups"] == [10, 10, 10, 10, 7]
    data = (tmp_path.parent / file["path"]).read_bytes()
    assert (file["num_bytes"], file["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    stored = _stored(plan, report)
    assert [stored.metadata.row_group(i).num_rows for i in range(5)] == file["row_groups"]
    assert stored.read()["x"].to_pylist() == values.tolist()


@pytest.mark.parametrize("batch_rows", [5, 10, 20, 40])
def test_rows_that_fill_the_last_row_group_leave_no_rest(tmp_path: Path, batch_rows: int) -> None:
    (file,) = _write(_plan(tmp_path), *[_batch(np.arange(batch_rows))] * (40 // batch_rows))["files"]
    assert file["row_groups"] == [10] * 4


def test_no_rows_make_no_file(tmp_path: Path) -> None:
    report = _write(_plan(tmp_path), _batch(np.zeros(0, dtype=np.int64)))
    assert report["files"] == []
    assert list(tmp_path.iterdir()) == []
    assert _write(_plan(tmp_path))["stats"]["train"][0]["rows"] == 0


def test_wide_rows_get_smaller_row_groups(tmp_path: Path) -> None:
    wide = Column(name="x", kind=Array("float32"))
    values = pa.ListArray.from_arrays(
        np.arange(0, 51 * 40_000, 40_000, dtype=np.int32), np.zeros(2_000_000, np.float32)
    )
    (file,) = _write(_plan(tmp_path, (wide,), row_group_rows=None), _batch(values))["files"]
    # 160 kB per row, 4 MiB per row group.
    assert file["row_groups"] == [26, 24]
    narrow = _write(_plan(tmp_path, row_group_rows=None), _batch(np.arange(20_000)))
    assert narrow["files"][0]["row_groups"] == [20_000]
    two = _write(_plan(tmp_path, row_group_rows=None), *[_batch(np.arange(20_000))] * 4)
    assert two["files"][0]["row_groups"] == [32_768, 32_768, 14_464]


def test_a_batch_of_wide_rows_is_encoded_in_pieces(tmp_path: Path) -> None:
    """Spark 3.5 limits its batches by rows only, and an image may take megabytes."""
    wide = Column(name="x", kind=Array("float32"))
    values = np.arange(1 << 24, dtype=np.float32)
    offsets = np.arange(0, len(values) + 1, 1 << 16, dtype=np.int32)
    batch = _batch(pa.ListArray.from_arrays(offsets, values), np.arange(256) % 2 == 0)
    pool, last = pa.proxy_memory_pool(pa.default_memory_pool()), pa.default_memory_pool()
    pa.set_memory_pool(pool)
    plan = _plan(tmp_path, (wide,), splits=True, row_group_rows=None)
    tracemalloc.start()
    try:
        report = _write(plan, batch)
        peak = pool.max_memory() + tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(last)
    assert peak < 0.75 * batch.nbytes, peak
    for split, first in (("validation", 0), ("train", 1)):
        expected = values.reshape(256, -1)[first::2]
        assert b"".join(_stored(plan, report, split).read()["x"].to_pylist()) == expected.tobytes(), split


@pytest.mark.parametrize("bad", [pa.array([[1.0], None]), pa.array([[1.0], [None]])], ids=str)
def test_data_that_will_be_refused_is_counted_and_not_kept(tmp_path: Path, bad: Any) -> None:
    column = Column(name="x", kind=Array("float64"))
    good = pa.array([[1.0]] * 30)
    report = _write(_plan(tmp_path, (column,)), _batch(good), _batch(bad), _batch(good))
    assert report["files"] == []
    assert (report["rows"], report["nulls"]) == (62, [1])
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
    names = {_write(_plan(tmp_path), _batch(np.arange(3)))["files"][0]["path"] for _ in range(3)}
    assert len(names) == 3
    assert all(name.startswith(f"{tmp_path.name}/part-00000-") for name in names)


def test_rows_with_nulls_are_skipped_and_counted(tmp_path: Path) -> None:
    columns = (X, Column(name="y", kind=Scalar("float64")))
    plan = _plan(tmp_path, columns, handle_invalid=("skip", "skip"))
    report = _write(plan, _batch([1, None, 3, 4], [0.5, 1.5, None, 2.5]))
    assert (report["rows"], report["skipped"], report["nulls"]) == (4, 2, [1, 1])
    assert _stored(plan, report).read().to_pydict() == {"x": [1, 4], "y": [0.5, 2.5]}


def test_kept_nulls_become_zeros_with_a_mask(tmp_path: Path) -> None:
    columns = (X, Column(name="y", kind=Padded("float64")), Column(name="z", kind=Array("int64")))
    plan = _plan(tmp_path, columns, handle_invalid=("keep", "keep", "keep"))
    report = _write(plan, _batch([1, None, 3], [[0.5], None, [1.5, None]], [[1, 2], None, [3, 4]]))
    assert _stored(plan, report).read().to_pydict() == {
        "x": [1, 0, 3],
        "x.isnull": [False, True, False],
        "y": [[0.5], [], [1.5, 0.0]],
        "y.isnull": [False, True, True],
        "z": [[1, 2], [], [3, 4]],
        "z.isnull": [False, True, False],
    }
    # The placeholder of a null row counts neither as another length nor as a value.
    assert report["shapes"][2] == [[2], [2]]
    assert report["stats"]["train"][0]["minimum"] == 1


def test_row_groups_of_rows_of_varying_length_are_sized_by_bytes(tmp_path: Path) -> None:
    lists = pa.ListArray.from_arrays(np.arange(0, 5 * 10**6, 10**6 // 2, dtype=np.int32), np.zeros(5 * 10**6))
    plan = _plan(tmp_path, (Column(name="x", kind=Padded("float64")),), row_group_rows=None)
    (file,) = _write(plan, *[_batch(lists)] * 2)["files"]
    assert file["row_groups"] == [1] * 18


def test_rows_of_one_size_are_bytes_and_compressed_only_where_it_pays(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    arrays = [
        draw.random((50, 200), dtype=np.float32),  # zstd saves a tenth
        draw.integers(0, 9, (50, 200)).astype(np.float32),
        draw.random((50, 200), dtype=np.float32),
    ]
    columns = tuple(Column(name=name, kind=Array("float32")) for name in ("noise", "digits", "nullable"))
    plan = _plan(tmp_path, columns, handle_invalid=("error", "error", "keep"))
    stored = _stored(plan, _write(plan, _batch(*(list(values) for values in arrays))))
    chunks = [stored.metadata.row_group(0).column(index) for index in range(3)]
    assert [str(kind) for kind in stored.schema_arrow.types[:2]] == ["fixed_size_binary[800]"] * 2
    assert pa.types.is_list(stored.schema_arrow.types[2])
    assert [chunk.compression for chunk in chunks] == ["UNCOMPRESSED", "ZSTD", "UNCOMPRESSED"]
    assert not any("DICTIONARY" in encoding for chunk in chunks for encoding in chunk.encodings)
    assert b"".join(stored.read()["noise"].to_pylist()) == arrays[0].tobytes()


@pytest.mark.parametrize("sizes", [(3, 4), (3, 0), (0, 3)])
def test_a_task_that_sees_two_sizes_reports_both_and_writes_nothing(tmp_path, sizes):
    column = Column(name="x", kind=Array("float64"))
    lists = [pa.array([[1.0] * size] * 20, pa.list_(pa.float64())) for size in sizes]
    report = _write(_plan(tmp_path, (column,)), *map(_batch, lists))
    assert report["shapes"] == [[[min(sizes)], [max(sizes)]]]
    assert (report["files"], report["problem"], list(tmp_path.iterdir())) == ([], None, [])


def test_what_a_later_stage_needs_is_imported_beside_the_write(tmp_path, monkeypatch):
    (tmp_path / "needed_by_the_gang.py").write_text("")
    (tmp_path / "broken_library.py").write_text("raise RuntimeError('built for another version')")
    monkeypatch.syspath_prepend(str(tmp_path))
    imports = ("not_installed_here", "broken_library", "needed_by_the_gang")
    _write(_plan(tmp_path, imports=imports), _batch(pa.array([1.0])))
    assert sys.modules.pop("needed_by_the_gang", None) is not None
