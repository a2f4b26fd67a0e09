"""Edge cases of readers: very few rows, little memory, changed files."""

import gc
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ringspark.pipelines import Array, Column, Scalar, ShardFile, ShardManifest, ShardReader, open_reader
from ringspark.pipelines.readers import Batch
from ringspark.pipelines.readers.arrow_reader import ArrowReader
from ringspark.pipelines.readers.cache import DiskCache
from ringspark.pipelines.readers.demand import read_again

pytestmark = pytest.mark.usefixtures("no_thread_left")

OPEN_FILES, MAPPED_FILES = Path("/proc/self/fd"), Path("/proc/self/maps")
counts_files = pytest.mark.skipif(not OPEN_FILES.exists(), reason="needs Linux's /proc")

ID = Column(name="id", kind=Scalar("int64"))


def _ids(rows: int) -> dict[str, np.ndarray]:
    return {"id": np.arange(rows, dtype=np.int64)}


def _joined(batches: Sequence[Batch]) -> list[int]:
    return [int(value) for batch in batches for value in batch["id"]]


def _read_all(
    manifest: ShardManifest, engine: str, *, num_shards: int = 1, batch_size: int = 1024, shuffle: bool = True
) -> list[int]:
    """Returns the sorted ids of one epoch over all shards; checks that all shards have the same steps."""
    ids: list[int] = []
    for shard in range(num_shards):
        reader = open_reader(manifest, None, shard, num_shards, batch_size, engine=engine, shuffle=shuffle)
        batches = list(reader.batches(0))
        assert len(batches) == reader.num_steps == -(-manifest.num_rows // batch_size)
        assert all(batch["id"].dtype == np.int64 for batch in batches)
        ids += _joined(batches)
    return sorted(ids)


def _entry(path: Path, split: str = "train") -> ShardFile:
    """Builds the manifest entry of an existing Parquet file."""
    metadata = pq.read_metadata(path)
    data = path.read_bytes()
    return ShardFile(
        path=path.name,
        split=split,
        num_bytes=len(data),
        sha256=sha256(data).hexdigest(),
        row_groups=tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)),
    )


def _shards(folder: Path, tables: Sequence[Any], columns: Sequence[Column], rows: int = 10) -> ShardManifest:
    """Writes one file per table with row groups of `rows`, and a manifest with `columns`."""
    folder.mkdir(exist_ok=True)
    files = []
    for number, table in enumerate(tables):
        path = folder / f"part-{number:05d}.parquet"
        pq.write_table(table, path, row_group_size=rows)
        files.append(_entry(path))
    return ShardManifest(uri=str(folder), columns=tuple(columns), files=tuple(files))


def _table(**columns: np.ndarray) -> Any:
    schema = pa.schema(
        [pa.field(k, pa.from_numpy_dtype(v.dtype), nullable=False) for k, v in columns.items()]
    )
    return pa.table(dict(columns), schema=schema)


def _path(manifest: ShardManifest, file: int) -> Path:
    return Path(manifest.paths[file])


def _recorded(reader: ShardReader, watch: Callable[[], object] = lambda: None) -> list[int]:
    """Records the row groups that a reader reads from the files; calls `watch` at each."""
    seen: list[int] = []
    original = reader.read_tables

    def read_tables(indexes: Sequence[int]) -> Iterator[Any]:
        tables = original(indexes)
        try:
            for index, table in zip(indexes, tables, strict=True):
                seen.append(index)
                watch()
                yield table
        finally:
            tables.close()

    reader.read_tables = read_tables
    return seen


def _settled(value: Callable[[], int]) -> int:
    """Returns the value once it is stable. A wait that is too short can only hide a failure."""
    last, same = value(), 0
    while same < 15:
        time.sleep(0.02)
        now = value()
        last, same = now, same + 1 if now == last else 0
    return last


def _open_files() -> int:
    """Counts open file handles and mapped Parquet files, because a mapping may need no handle."""
    mapped = {line.split()[-1] for line in MAPPED_FILES.read_text().splitlines() if ".parquet" in line}
    return len(os.listdir(OPEN_FILES)) + len(mapped)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    ("rows", "num_files", "num_shards", "batch_size"),
    [
        *[(20, 1, num_shards, 6) for num_shards in (3, 7, 100)],
        *[(1, 1, 1, 1), (1, 1, 3, 1), (1, 1, 3, 1000)],
        *[(37, 2, num_shards, size) for num_shards in (1, 4) for size in (38, 10**6, 2**40)],
    ],
)
def test_few_rows_are_read_once(ordered_shards, engine, rows, num_files, num_shards, batch_size, shuffle):
    manifest = ordered_shards(_ids(rows), num_files=num_files)
    folder = _path(manifest, 0).parent
    # Readers read only files that the manifest names.
    (folder / "part-00000-stray.parquet").write_bytes(_path(manifest, 0).read_bytes())
    pq.write_table(_table(id=np.arange(0)), folder / "part-00000-empty.parquet")
    (folder / "part-00000-nothing.parquet").touch()
    ids = _read_all(manifest, engine, num_shards=num_shards, batch_size=batch_size, shuffle=shuffle)
    assert ids == list(range(rows))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("empty_group", [False, True])
def test_files_and_row_groups_without_rows_are_passed_over(tmp_path, engine, empty_group, shuffle):
    tables = [_table(id=np.arange(start, end)) for start, end in ((0, 0), (0, 15), (0, 0), (15, 20), (0, 0))]
    manifest = _shards(tmp_path, tables, [ID])
    if empty_group:
        # Some writers flush an empty row group before the other row groups.
        path = _path(manifest, 1)
        with pq.ParquetWriter(path, tables[1].schema) as writer:
            writer.write_table(tables[0])
            writer.write_table(tables[1])
        manifest = replace(manifest, files=(manifest.files[0], _entry(path), *manifest.files[2:]))
        assert manifest.files[1].row_groups == (0, 15)
    assert manifest.num_rows == 20
    manifest.verify()
    for num_shards in (1, 3):
        ids = _read_all(manifest, engine, num_shards=num_shards, batch_size=4, shuffle=shuffle)
        assert ids == list(range(20))


@pytest.mark.parametrize("split", ["train", "validation"])
def test_no_rows_or_no_files_have_no_steps(tmp_path: Path, engine: str, split: str) -> None:
    manifest = _shards(tmp_path, [_table(id=np.arange(0))] * 2, [ID]).select(split)
    reader = open_reader(manifest, engine=engine)
    assert reader.num_steps == 0
    assert list(reader.batches(0)) == []


GROUP_ROWS = 1 << 18


class _EndlessFile(ArrowReader):
    """Generates row groups of ids without a file."""

    def read_tables(self, indexes: Sequence[int]) -> Iterator[Any]:
        for index in indexes:
            start = index * GROUP_ROWS
            yield _table(id=np.arange(start, start + self.manifest.row_groups[index], dtype=np.int64))


@pytest.fixture(
    params=[pytest.param(2**31, id="2**31"), pytest.param(2**33, id="2**33", marks=pytest.mark.slow)]
)
def huge(request: pytest.FixtureRequest, tmp_path: Path) -> ShardManifest:
    """A manifest of `request.param` + 12,345 rows; its file holds one byte."""
    (tmp_path / "huge.parquet").write_bytes(b"x")
    row_groups = (GROUP_ROWS,) * (request.param // GROUP_ROWS) + (12_345,)
    file = ShardFile(path="huge.parquet", split="train", num_bytes=1, sha256="", row_groups=row_groups)
    manifest = ShardManifest(uri=str(tmp_path), columns=(ID,), files=(file,))
    return ShardManifest.from_json(manifest.to_json(), manifest.uri)


@pytest.mark.parametrize("shuffle", [True, False])
def test_resuming_near_the_end_of_billions_of_rows(huge: ShardManifest, shuffle: bool) -> None:
    total, batch_size, num_shards = sum(huge.row_groups), 1000, 24
    assert huge.num_rows == total > 2**31
    ids: list[int] = []
    for shard in range(num_shards):
        reader = _EndlessFile(huge, None, shard, num_shards, batch_size, seed=1, shuffle=shuffle)
        last = reader.num_steps - 1
        assert last == total // batch_size
        batches = list(reader.batches(2, start_step=last - 1))
        rows = [reader.plan(2).shard_rows(step, shard) for step in (last - 1, last)]
        assert [len(batch["id"]) for batch in batches] == rows
        ids += _joined(batches)
    assert len(ids) == len(set(ids)) == batch_size + total - last * batch_size
    assert min(ids) >= 0
    assert max(ids) < total
    if not shuffle:
        assert sorted(ids) == list(range((last - 1) * batch_size, total))


@pytest.mark.slow
@counts_files
def test_thousands_of_files_are_read_with_few_open(tmp_path: Path, engine: str) -> None:
    num_files, each = 2000, 3
    tables = [_table(id=np.arange(each * n, each * (n + 1))) for n in range(num_files)]
    manifest = _shards(tmp_path, tables, [ID])
    counts = [_open_files()]
    reader = open_reader(manifest, batch_size=50, engine=engine)
    seen = _recorded(reader, lambda: counts.append(_open_files()))
    assert sorted(_joined(list(reader.batches(0)))) == list(range(num_files * each))
    assert len(seen) == num_files
    # A handle and a mapping for each of 64 files, and a few more for queued files.
    assert max(counts) - counts[0] <= 200
    assert _open_files() <= counts[0]


def test_a_subset_of_columns_leaves_the_bytes_of_the_others_alone(ordered_shards: Any, engine: str) -> None:
    rows = np.arange(40)
    manifest = ordered_shards({"id": rows, "other": rows * 3, "last": rows * 5})
    for file in range(2):
        path = _path(manifest, file)
        data = bytearray(path.read_bytes())
        for group in range(len(manifest.files[file].row_groups)):
            chunk = pq.read_metadata(path).row_group(group).column(1)
            start = min(filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset)))
            data[start : start + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
        path.write_bytes(data)
    (batch,) = open_reader(manifest, ["last", "id"], engine=engine).batches(0)
    assert list(batch) == ["last", "id"]
    assert sorted(batch["id"].tolist()) == rows.tolist()
    assert np.array_equal(batch["last"], batch["id"] * 5)
    with pytest.raises(RuntimeError, match=r"row group \d of '.*\.parquet' failed"):
        list(open_reader(manifest, ["other"], engine=engine).batches(0))


def test_columns_that_the_manifest_does_not_name_are_not_read(tmp_path: Path, engine: str) -> None:
    # The extra columns are at different positions in the files.
    first = _table(extra=np.arange(20) * 0.5, id=np.arange(20))
    second = _table(id=np.arange(20, 40), more=np.ones(20, dtype=bool))
    manifest = _shards(tmp_path, [first, second], [ID])
    reader = open_reader(manifest, batch_size=7, engine=engine)
    batches = list(reader.batches(0))
    assert all(list(batch) == ["id"] for batch in batches)
    assert sorted(_joined(batches)) == list(range(40))


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_column_missing_in_a_file_is_named_with_the_file(tmp_path: Path, engine: str, lacking: int) -> None:
    tables = [_table(id=np.arange(20), x=np.arange(20) * 0.5)] * 2
    tables[lacking] = tables[lacking].drop(["x"])
    manifest = _shards(tmp_path, tables, [ID, Column(name="x", kind=Scalar("float64"))])
    with pytest.raises(RuntimeError, match=rf"part-0000{lacking}\.parquet' failed .*\bx\b"):
        list(open_reader(manifest, engine=engine).batches(0))


def _padded(path: Path, num_bytes: int) -> None:
    """Pads a Parquet file between data and footer, without changing its contents."""
    data = path.read_bytes()
    footer = 8 + int.from_bytes(data[-8:-4], "little")
    room = num_bytes - len(data)
    assert room >= 0
    path.write_bytes(data[:-footer] + bytes(room) + data[-footer:])


@pytest.mark.parametrize(
    "row_groups",
    [(10,), (9, 10), (20,), (5, 5, 5, 5), (10, 10, 10)],
    ids=str,
)
def test_a_file_of_the_same_size_with_other_row_groups_is_refused(tmp_path, engine, row_groups):
    noise = np.random.default_rng(0).integers(2**62, size=50)  # incompressible, so more rows need more bytes
    columns = [ID, Column(name="noise", kind=Scalar("int64"))]
    table = _table(id=np.arange(50), noise=noise)
    manifest = _shards(tmp_path, [table.slice(0, 20), table.slice(20, 20)], columns)
    path = _path(manifest, 1)
    replaced = tmp_path / "replaced"
    with pq.ParquetWriter(replaced, table.schema) as writer:
        start = 20
        for rows in row_groups:
            writer.write_table(table.slice(start, rows))
            start += rows
    size = max(replaced.stat().st_size, path.stat().st_size)
    _padded(path, size)
    _padded(replaced, size)
    replaced.rename(path)
    files = (manifest.files[0], replace(manifest.files[1], num_bytes=size))
    manifest = replace(manifest, files=files)
    with pytest.raises(ValueError, match=path.name):
        manifest.verify_files()
    with pytest.raises(RuntimeError, match=path.name):
        list(open_reader(manifest, engine=engine).batches(0))


WIDE = 1 << 14


@pytest.fixture
def wide(tmp_path: Path) -> ShardManifest:
    """100 row groups that decode to half a MiB each; almost no bytes on disk."""
    folder = tmp_path / "wide"
    rows = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(80 * WIDE, np.float32)), WIDE)
    lists = rows.cast(pa.list_(pa.field("element", pa.float32(), nullable=False)))
    schema = pa.schema([pa.field("x", lists.type, nullable=False)])
    table = pa.table([lists], schema=schema)
    column = Column(name="x", kind=Array("float32", (WIDE,)))
    return _shards(folder, [table] * 10, [column], rows=8)


def test_a_slow_consumer_is_not_run_away_from(wide: ShardManifest, engine: str) -> None:
    reader = open_reader(wide, batch_size=8, engine=engine, shuffle=False)
    seen = _recorded(reader)
    batches = reader.batches(0)
    ahead = []
    used = 0
    for steps in (1, 10, 30):
        used += len(list(islice(batches, steps)))
        ahead.append(_settled(lambda: len(seen)) - used)
    batches.close()
    # The reader is some MiB of blocks and a few row groups per queue ahead, at any position.
    assert max(ahead) <= 48
    assert max(ahead) - min(ahead) <= 24
    assert len(seen) < len(wide.row_groups)


@counts_files
def test_closing_early_stops_threads_and_frees_files_at_once(wide: ShardManifest, engine: str) -> None:
    list(islice(open_reader(wide, engine=engine).batches(0), 1))  # opens what an engine opens once
    gc.collect()
    threads, files = set(threading.enumerate()), _open_files()
    gc.disable()
    try:
        for shuffle, taken in ((True, 1), (False, 1), (True, 0), (True, 3)):
            batches = open_reader(wide, batch_size=8, engine=engine, shuffle=shuffle).batches(0)
            assert len(list(islice(batches, taken))) == taken
            assert taken == 0 or set(threading.enumerate()) > threads
            batches.close()
            assert set(threading.enumerate()) == threads
            assert _open_files() <= files
    finally:
        gc.enable()


@pytest.mark.parametrize("cache", ["memory", "disk"])
def test_a_cached_epoch_needs_no_file(ordered_shards: Any, engine: str, cache: str) -> None:
    manifest = ordered_shards(_ids(200), num_files=3)
    expected = [_joined(list(open_reader(manifest, engine=engine).batches(epoch))) for epoch in range(3)]
    reader = open_reader(manifest, engine=engine, cache=cache)
    seen = _recorded(reader)
    assert _joined(list(reader.batches(0))) == expected[0]
    assert len(seen) == len(manifest.row_groups)
    for path in manifest.paths:
        Path(path).unlink()
    for epoch in (1, 2, 0):
        assert _joined(list(reader.batches(epoch))) == expected[epoch]
    assert len(seen) == len(manifest.row_groups)


@pytest.mark.parametrize("cache", ["memory", "disk"])
def test_a_cache_keeps_to_its_bytes_and_the_rest_is_read_again(
    ordered_shards, engine, cache, tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    manifest = ordered_shards(_ids(200), num_files=2, row_group_rows=10)
    reader = open_reader(manifest, engine=engine, cache=cache, cache_bytes=10 * 8 * 7 + 79)
    seen = _recorded(reader)
    for epoch in range(3):
        assert sorted(_joined(list(reader.batches(epoch)))) == list(range(200))
    assert reader.cache is not None
    assert reader.cache.num_bytes == 10 * 8 * 7
    kept = {index for index in range(20) if index in reader.cache}
    assert len(kept) == 7
    assert len(seen) == 20 + 13 + 13
    assert kept.isdisjoint(seen[20:])
    # The cache file has no name, so it cannot be left behind when this process ends.
    assert list(tmp_path.glob("ringspark-cache-*")) == []
    if isinstance(reader.cache, DiskCache):
        size = os.fstat(reader.cache.fd).st_size
        assert reader.cache.num_bytes <= size <= 7 * 128  # 80 bytes each, aligned to 64


def test_a_cache_keeps_what_its_shard_reads_again_and_nothing_else(ordered_shards: Any, engine: str) -> None:
    manifest = ordered_shards(_ids(1000), num_files=2, row_group_rows=10)
    deal: dict[str, Any] = {"shard": 1, "num_shards": 3, "batch_size": 16, "seed": 5}
    plain = open_reader(manifest, engine=engine, **deal)
    reads = _recorded(plain)
    expected = [_joined(list(plain.batches(epoch))) for epoch in range(4)]
    again = read_again(np.asarray(manifest.row_groups), range(4), shuffle=True, **deal)
    assert again.tolist() == [group for group, times in sorted(Counter(reads).items()) if times > 1]
    assert 0 < len(again) < len(set(reads))
    reader = open_reader(
        manifest, engine=engine, cache="memory", cached_row_groups=frozenset(again.tolist()), **deal
    )
    seen = _recorded(reader)
    assert [_joined(list(reader.batches(epoch))) for epoch in range(4)] == expected
    assert sorted(seen) == sorted(set(reads))
    assert reader.cache is not None
    assert reader.cache.num_bytes == 8 * 10 * len(again)
