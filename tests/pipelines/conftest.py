"""Fixtures of the pipelines tests: shards in row order, and a check that no thread is left."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ringspark.pipelines import READERS, Column, ShardFile, ShardManifest, check_engine, readers
from ringspark.pipelines.entry_points import list_entry_points
from ringspark.pipelines.kinds import Array, Scalar
from ringspark.pipelines.typed_json import record
from ringspark.pipelines.writing.shard_writer import WritePlan, write_partition
from ringspark.pipelines.writing.task_reports import join_reports

MakeShards = Callable[..., ShardManifest]


def _arrow(values: np.ndarray[Any, Any]) -> Any:
    if values.ndim == 1:
        return pa.array(values)
    offsets = np.arange(0, values.size + 1, values.shape[1], dtype=np.int32)
    return pa.ListArray.from_arrays(offsets, values.ravel())


def _column(name: str, values: np.ndarray[Any, Any]) -> Column:
    return Column(name=name, kind=(Scalar if values.ndim == 1 else Array)(values.dtype.name))


@pytest.fixture
def ordered_shards(tmp_path: Path) -> MakeShards:
    """Returns a function that writes NumPy columns as shards in row order, without Spark."""

    def make(
        data: dict[str, np.ndarray[Any, Any]],
        *,
        num_files: int = 2,
        row_group_rows: int = 10,
        name: str = "shards",
    ) -> ShardManifest:
        folder = tmp_path / name
        (folder / "_shards-test").mkdir(parents=True)
        plan = WritePlan(
            uri=str(folder),
            folder="_shards-test",
            columns=tuple(_column(key, values) for key, values in data.items()),
            handle_invalid=("error",) * len(data),
            row_group_rows=row_group_rows,
        )
        reports = []
        for part in np.array_split(np.arange(len(next(iter(data.values())))), num_files):
            batch = pa.RecordBatch.from_arrays([_arrow(v[part]) for v in data.values()], names=list(data))
            reports += [json.loads(row.column(0)[0].as_py()) for row in write_partition(plan, iter([batch]))]
        for number, report in enumerate(reports):
            # File names are random; numbering them makes the file order equal the row order.
            for file in report["files"]:
                path = f"_shards-test/part-{number:05d}.parquet"
                (folder / file["path"]).rename(folder / path)
                file["path"] = path
        files = [record(ShardFile, file) for report in reports for file in report["files"]]
        manifest = join_reports(plan, reports, files)
        manifest.save()
        return manifest

    return make


@pytest.fixture(params=[*READERS, *list_entry_points(readers.ENTRY_POINTS)])
def engine(request: pytest.FixtureRequest) -> str:
    """Runs the test with every reading engine, including installed plugins; skips unavailable engines."""
    name: str = request.param
    try:
        check_engine(name)
    except ValueError as error:
        pytest.skip(str(error))
    return name


@pytest.fixture
def no_thread_left() -> Iterator[None]:
    """Fails when a test leaves a thread running."""

    def running() -> set[threading.Thread]:
        # Ignores the timer that releases an earlier test's model.
        return {thread for thread in threading.enumerate() if not isinstance(thread, threading.Timer)}

    before = running()
    yield
    deadline = time.monotonic() + 5
    while (left := running() - before) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert not left, f"threads left running: {left}"
