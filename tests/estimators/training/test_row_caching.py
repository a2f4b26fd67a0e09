"""Param `cache`: identical trainings, the reported bytes, and no leftovers."""

import os
import tempfile
import threading
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_training import Runs, weights_of

from ringspark.estimators.launch.local import train_here
from ringspark.estimators.memory.available import Available
from ringspark.estimators.memory.pressure import (
    check_memory,
    choose_cache,
    free_disk,
    resolve_cache,
    worker_needs,
)
from ringspark.estimators.training import feed, worker
from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.estimators.training.row_caching import find_cached_rows
from ringspark.estimators.training.settings.config import UserObjects
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardReader
from ringspark.pipelines.readers import base

SPEC = ModelSpec("linear", {"in_features": 4, "out_features": 1})
SETTINGS = {"model": SPEC}
ROW_BYTES = 4 * 4 + 4
HELD_OUT = np.arange(300) % 3 == 0


class _Fails(Callback):
    def on_epoch_end(self, state: TrainingState) -> None:
        if state.epoch == 2:
            raise KeyError("on purpose")


def _open_files(folder: Path) -> list[str]:
    """Returns the files below `folder` that this process has open, also those without a name."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # another thread closed it
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return [link for link in links if link.startswith(f"{folder}/")]


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
def test_each_cache_trains_alike_and_frees(runs: Runs, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    temporary = runs.folder.resolve() / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    manifest = runs.shards(300, row_group_rows=10, validation=HELD_OUT)
    readers: list[ShardReader] = []
    seen: list[tuple[int, int]] = []  # of every epoch: open files and kept bytes

    class Counts(Callback):
        def on_epoch_end(self, state: TrainingState) -> None:
            kept = sum(reader.cache.num_bytes for reader in readers if reader.cache is not None)
            seen.append((len(_open_files(temporary)), kept))

    original = worker.open_reader

    def opened(*args: Any, **settings: Any) -> ShardReader:
        readers.append(original(*args, **settings))
        return readers[-1]

    monkeypatch.setattr(worker, "open_reader", opened)
    weights = []
    for cache in ("none", "memory", "disk"):
        readers.clear()
        seen.clear()
        config = runs.config(manifest, epochs=3, cache=cache)
        objects = UserObjects(callbacks=(Counts(), *([_Fails()] if fails else [])))
        with pytest.raises(KeyError) if fails else nullcontext():
            weights.append(weights_of(train_here(config, objects), SPEC.build()))
        parts = [find_cached_rows(config, manifest, split, 0, 1) for split in ("train", "validation")]
        said = sum(part.num_bytes for part in parts)
        assert said == 300 * ROW_BYTES
        # One file per reader.
        assert set(seen) == {(2 if cache == "disk" else 0, 0 if cache == "none" else said)}
        assert all(reader.cache is None for reader in readers)
        assert (_open_files(temporary), list(temporary.glob("ringspark-*"))) == ([], [])
    assert all(other.equal(weights[0]) for other in weights)


@pytest.mark.parametrize(
    ("num_bytes", "memory", "disk", "chosen"),
    [
        (0, 1000, 1000, "none"),
        (500, 1000, 0, "memory"),
        (501, 1000, 1002, "disk"),
        (501, 1000, 1001, "none"),
        (1, None, 2, "disk"),
    ],
)
def test_auto_takes_what_has_double_room(num_bytes: int, memory: int | None, disk: int, chosen: str) -> None:
    assert choose_cache(num_bytes, memory, disk) == chosen


@pytest.mark.extras
def test_the_memory_check_counts_what_is_kept(runs: Runs) -> None:
    manifest = runs.shards(300, row_group_rows=10)
    config = runs.config(manifest, cache="memory")
    needs = worker_needs(config, UserObjects(), manifest)
    assert needs["kept rows"] == 300 * ROW_BYTES
    total = sum(needs.values())
    with pytest.raises(ValueError, match=r"kept rows .*; set cache='disk' or cache='auto', or"):
        check_memory(config, UserObjects(), manifest, [Available(num_bytes=total - 1, source="here")])
    asked = replace(config, cache="auto")
    left = check_memory(asked, UserObjects(), manifest, [Available(num_bytes=total, source="here")])
    assert left is not None
    # If "memory" is refused, "auto" caches on disk.
    assert resolve_cache(asked, manifest, 0, 1, 1, left).cache == "disk"
    assert resolve_cache(asked, manifest, 0, 1, 1, 2 * 300 * ROW_BYTES).cache == "memory"


def test_auto_looks_at_the_disk_only_if_memory_is_short(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, asked = runs.manifest(300), runs.config(300, cache="auto")

    def no_folder() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", no_folder)
    assert resolve_cache(asked, manifest, 0, 1, 1, 1 << 30).cache == "memory"
    assert resolve_cache(asked, manifest, 0, 1, 1, 0).cache == "none"


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="needs Linux's file system in memory")
def test_a_file_system_in_memory_is_no_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    assert free_disk() == 0
    # Without a readable mount table, only the file system's report counts.
    monkeypatch.setattr(Path, "read_text", _refuses)
    assert free_disk() > 0


def _refuses(*args: Any, **settings: Any) -> str:
    raise PermissionError(13, "on purpose")


def test_no_thread_outlives_a_validation_that_fails(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_BLOCK_ROWS", 2)  # keeps the reader thread from finishing early
    to_batch, made = feed.to_batch, count()

    def fails(*args: Any) -> feed.Batch:
        if next(made) > 102:  # the first 100 are training batches
            raise KeyError("on purpose")
        return to_batch(*args)

    monkeypatch.setattr(feed, "to_batch", fails)
    with pytest.raises(KeyError) as caught:
        runs.here(runs.shards(300, validation=HELD_OUT), batch_size=2)
    # The error holds its frames, and one of them holds the reader's batches.
    assert caught.value.__traceback__ is not None
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("ringspark")] == []
