"""Fixtures of the pipelines tests: shards in row order, and a check that no thread is left."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from written_shards import written

from ringspark.pipelines import READERS, ShardManifest, check_engine, readers
from ringspark.pipelines.entry_points import list_entry_points

MakeShards = Callable[..., ShardManifest]


@pytest.fixture
def ordered_shards(tmp_path: Path) -> MakeShards:
    """Returns a function that writes NumPy columns as shards in row order, without Spark."""

    def make(data: Any, *, row_group_rows: int = 10, num_files: int = 2, name: str = "shards") -> Any:
        manifest = written(tmp_path / name, data, row_group_rows=row_group_rows, num_files=num_files)
        files = []
        for number, file in enumerate(manifest.files):
            # File names are random; numbering them makes the file order equal the row order.
            path = f"_shards-test/part-{number:05d}.parquet"
            (tmp_path / name / file.path).rename(tmp_path / name / path)
            files.append(replace(file, path=path))
        manifest = replace(manifest, files=tuple(files))
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
