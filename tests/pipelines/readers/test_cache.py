"""Failure cases of the disk cache: many arrays, a full disk, threads, forked children, closing."""

import logging
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringspark.pipelines.readers.cache import DiskCache

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux's /proc")


def _rows(value: int, rows: int = 10) -> dict[str, Any]:
    return {"x": np.full((rows, 16), value, np.float32)}


def _holds(cache: DiskCache, index: int) -> bool:
    rows: Any = cache.get(index)["x"]
    return bool((rows == index).all())


@pytest.fixture
def cache() -> DiskCache:
    return DiskCache(1 << 40)


@pytest.mark.parametrize("rows", [4, 4000], ids=["small", "large"])
def test_a_row_group_takes_at_most_one_descriptor(cache: DiskCache, rows: int) -> None:
    nothing = np.zeros((0, 3))
    columns = {f"x{i}": np.full((rows, 1), i, np.int32 if i % 2 else np.int8) for i in range(50)}
    cache.put(6, _rows(6))
    cache.put(7, {"empty": nothing, **columns, "last": nothing})
    before = len(os.listdir("/proc/self/fd"))
    row_group: dict[str, Any] = cache.get(7)
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    assert all(row_group[name].tobytes() == values.tobytes() for name, values in columns.items())
    assert row_group["empty"].shape == row_group["last"].shape == (0, 3)
    assert not row_group["x1"].flags.writeable


def test_many_small_row_groups_take_no_descriptors(cache: DiskCache) -> None:
    for index in range(300):
        cache.put(index, _rows(index))
    before = len(os.listdir("/proc/self/fd"))
    held = [cache.get(index) for index in range(300)]
    assert len(os.listdir("/proc/self/fd")) == before, f"with {len(held)} row groups in use"


def test_a_full_disk_ends_the_keeping_and_nothing_else(cache, monkeypatch, caplog):
    write, left = os.pwrite, [1000]

    def fills_up(fd: int, data: memoryview, offset: int) -> int:
        if not left[0]:
            raise OSError(28, "No space left on device")
        written = write(fd, data[: left[0]], offset)
        left[0] -= written
        return written

    cache_bytes = 10 * 16 * 4
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, "pwrite", fills_up)
        for index in range(4):
            cache.put(index, _rows(index))
    cache.put(5, _rows(5))  # there is room again, but the cache stopped taking row groups
    assert [index for index in range(6) if index in cache] == [0]
    assert _holds(cache, 0)
    assert cache.num_bytes == cache_bytes
    assert len(caplog.records) == 1
    assert "No space left on device" in caplog.text


def test_threads_that_fill_one_file_do_not_write_over_one_another(cache: DiskCache) -> None:
    def fill(first: int) -> None:
        for index in range(first, 100, 4):
            cache.put(index, _rows(index, 5000))

    threads = [threading.Thread(target=fill, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [index for index in range(100) if not _holds(cache, index)] == []


def test_a_forked_child_reads_what_was_kept_and_keeps_nothing(cache: DiskCache) -> None:
    cache.put(1, _rows(1))
    child = os.fork()
    if child == 0:
        try:
            cache.put(2, _rows(2))
            os._exit(0 if 2 not in cache and _holds(cache, 1) else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    size = os.fstat(cache.fd).st_size
    assert size < 2 * cache.num_bytes, "the child wrote where its parent writes next"


def test_a_closed_cache_writes_to_no_file(cache: DiskCache, tmp_path: Path) -> None:
    number = cache.fd
    cache.close()
    files = [(tmp_path / "0").open("wb")]
    while files[-1].fileno() < number:  # until the kernel reuses the file descriptor
        files.append((tmp_path / str(len(files))).open("wb"))
    # A reading thread may call put() after close().
    cache.put(0, _rows(0))
    assert [os.fstat(file.fileno()).st_size for file in files] == [0] * len(files)
    for file in files:
        file.close()


def test_closing_waits_for_a_row_group_that_is_being_written(cache, monkeypatch):
    write, writes, goes_on = os.pwrite, threading.Event(), threading.Event()
    open_at_the_end: list[bool] = []

    def slow(fd: int, data: memoryview, offset: int) -> int:
        writes.set()
        goes_on.wait(1)
        open_at_the_end.append(Path(f"/proc/self/fd/{fd}").is_symlink())
        return write(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", slow)
    puts = threading.Thread(target=cache.put, args=(0, _rows(0)))
    puts.start()
    assert writes.wait(60)
    closes = threading.Thread(target=cache.close)
    closes.start()
    closes.join(0.1)
    goes_on.set()
    puts.join()
    closes.join()
    assert open_at_the_end == [True]
    assert cache.fd == -1
