"""Retries of store reads are counted per row group."""

import io
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem

from ringspark.pipelines import ShardManifest, open_reader
from ringspark.pipelines.readers import retry


class InterruptedDisk(LocalFileSystem):
    """Interrupts the first reads of every shard file with an error or a short read."""

    protocol = "interrupted"
    times = 1
    is_silent = False
    begun: Counter[str] = Counter()

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if path.endswith(".parquet"):
            self.begun[path] += 1
            if self.begun[path] <= self.times:
                if self.is_silent:
                    return io.BytesIO(Path(path).read_bytes()[:-3])
                raise ConnectionError("reset")
        return super().open(path, mode, **options)


@pytest.fixture
def manifest(ordered_shards: Callable[..., ShardManifest], monkeypatch: pytest.MonkeyPatch) -> ShardManifest:
    """120 rows in 8 files of two row groups each."""
    monkeypatch.setattr(retry, "FIRST_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(InterruptedDisk, "begun", Counter())
    fsspec.register_implementation("interrupted", InterruptedDisk, clobber=True)
    shards = ordered_shards({"id": np.arange(120)}, num_files=8)
    return replace(shards, uri=f"interrupted://{shards.uri}")


def _read(manifest: ShardManifest, engine: str) -> list[int]:
    batches = open_reader(manifest, engine=engine, batch_size=15, shuffle=False).batches(0)
    return np.concatenate([batch["id"] for batch in batches]).tolist()


@pytest.mark.parametrize("is_silent", [True, False], ids=["short", "reset"])
def test_interruptions_of_different_row_groups_do_not_add_up(manifest, monkeypatch, engine, is_silent):
    monkeypatch.setattr(InterruptedDisk, "is_silent", is_silent)
    assert _read(manifest, engine) == list(range(120))
    assert len(InterruptedDisk.begun) == 2 * retry.MAX_ATTEMPTS


@pytest.mark.parametrize("times", [retry.MAX_ATTEMPTS - 1, retry.MAX_ATTEMPTS])
def test_a_row_group_is_read_in_the_last_attempt_or_not_at_all(manifest, monkeypatch, times):
    monkeypatch.setattr(InterruptedDisk, "times", times)
    if times < retry.MAX_ATTEMPTS:
        assert _read(manifest, "arrow") == list(range(120))
    else:
        with pytest.raises(RuntimeError, match="failed after 4 attempts"):
            _read(manifest, "arrow")
