"""Attempts at row groups of a store are counted per row group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem

from ringspark.pipelines import ShardManifest, open_reader
from ringspark.pipelines.readers import retry


class InterruptedDisk(LocalFileSystem):
    """Breaks off the first read of every shard file."""

    protocol = "interrupted"
    begun: set[str] = set()

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if path.endswith(".parquet") and path not in self.begun:
            self.begun.add(path)
            raise ConnectionError("reset")
        return super().open(path, mode, **options)


def test_interruptions_of_different_row_groups_do_not_add_up(
    ordered_shards: Callable[..., ShardManifest], monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setattr(retry, "FIRST_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(InterruptedDisk, "begun", set())
    fsspec.register_implementation("interrupted", InterruptedDisk, clobber=True)
    manifest = ordered_shards({"id": np.arange(120)}, num_files=2 * retry.MAX_ATTEMPTS)
    manifest = replace(manifest, uri=f"interrupted://{manifest.uri}")
    batches = open_reader(manifest, engine=engine, batch_size=15, shuffle=False).batches(0)
    assert np.concatenate([batch["id"] for batch in batches]).tolist() == list(range(120))
    assert len(InterruptedDisk.begun) == 2 * retry.MAX_ATTEMPTS
