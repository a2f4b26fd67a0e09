"""Shards are reused for the same key, columns and settings only."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest

from ringspark.extras.reuse import cache_entries
from ringspark.extras.reuse.cache_entries import DIGITS
from ringspark.pipelines import (
    ShardManifest,
    Tokens,
    cached_shards,
    list_cached,
    open_reader,
    remove_cached,
    storage,
)
from ringspark.pipelines.table_files import path_states
from ringspark.pipelines.writing import shards

spark_test = pytest.mark.spark


def ids_of(manifest: ShardManifest) -> list[int]:
    batches = open_reader(manifest, engine="arrow", shuffle=False).batches(0)
    return sorted(int(value) for batch in batches for value in batch["id"])


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "cache")


@spark_test
@pytest.mark.modes
def test_rows_of_one_key_are_written_once(spark: Any, root: str) -> None:
    def files() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in Path(root).rglob("*") if path.is_file()}

    first = cached_shards(spark.range(40), root, key="v1", num_files=2, row_group_rows=30)
    before = files()
    # The key names the rows, so the same rows in another plan, by settings in another order, are not written
    # again.
    settings = {"row_group_rows": 30, "num_files": 2}
    second = cached_shards(spark.range(40).where("id >= 0"), root, key="v1", **settings)
    assert second == first
    assert files() == before
    assert ids_of(second) == list(range(40))


@spark_test
@pytest.mark.modes
def test_another_key_or_other_columns_or_settings_are_another_entry(spark: Any, root: str) -> None:
    rows = spark.range(40).selectExpr("id", "id * 2 AS x", "id % 5 AS part")
    variants = [
        (rows, {}),
        (rows, {"key": "v2"}),
        (rows.select("id", "x"), {}),
        (rows.select("x", "id"), {}),
        (rows.select("id", rows.x.alias("z")), {}),
        (rows.select("id", rows.x.cast("int")), {}),
        (rows, {"row_group_rows": 8}),
        (rows, {"row_group_rows": 9}),
        (rows.selectExpr("id", "part < 1 AS held_out"), {"validation_col": "held_out"}),
    ]
    uris = [cached_shards(df, root, **{"key": "v1", **settings}).uri for df, settings in variants]
    assert len(set(uris)) == len(variants)
    again = [cached_shards(df, root, **{"key": "v1", **settings}).uri for df, settings in variants[:3]]
    assert again == uris[:3]


@spark_test
def test_tokenizers_of_equal_length_are_another_entry(spark: Any, root: str) -> None:
    from tokenizers import Tokenizer, models

    rows = spark.range(40).selectExpr("concat('t', id % 3) AS s")

    def ids(vocabulary: dict[str, int]) -> set[int]:
        tokens = Tokens.of(Tokenizer(models.WordLevel(vocabulary, unk_token="?")), max_length=1)
        manifest = cached_shards(rows, root, key="v1", columns={"s": tokens})
        reader = open_reader(manifest, engine="arrow", shuffle=False)
        return {int(number) for batch in reader.batches(0) for number in batch["s.ids"].ravel()}

    assert ids({"?": 0, "t0": 1, "t1": 2, "t2": 3}) == {1, 2, 3}
    # The repr of Tokens shows only the length of the tokenizer's text, and this text has the same length.
    assert ids({"?": 0, "u0": 1, "u1": 2, "u2": 3}) == {0}


@spark_test
def test_an_interrupted_write_is_never_served(spark: Any, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = spark.range(40)

    def die(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shards, "commit", die)
        with pytest.raises(KeyboardInterrupt):
            cached_shards(rows, root, key="v1")
        assert list_cached(root) == []
        # A killed process cleans up nothing.
        patch.setattr(shards, "discard", lambda *args: None)
        with pytest.raises(KeyboardInterrupt):
            cached_shards(rows, root, key="v1")
    (left,) = list_cached(root)
    assert (left.key, left.created) == ("v1", "")
    assert left.num_bytes > 0
    (part,) = Path(left.uri).glob("_shards-*")
    manifest = cached_shards(rows, root, key="v1")
    assert all(not file.path.startswith(part.name) for file in manifest.files)
    assert cached_shards(rows, root, key="v1") == manifest
    assert remove_cached(root) > 0
    assert os.listdir(root) == []


@spark_test
@pytest.mark.parametrize("fault", ["cut", "gone", "manifest"])
def test_a_damaged_entry_is_written_again(spark: Any, root: str, fault: str) -> None:
    rows = spark.range(40)
    first = cached_shards(rows, root, key="v1")
    file = Path(first.uri) / first.files[0].path
    if fault == "cut":
        file.write_bytes(file.read_bytes()[:-10])
    elif fault == "gone":
        file.unlink()
    else:
        (Path(first.uri) / "manifest.json").unlink()
    second = cached_shards(rows, root, key="v1")
    assert second.files != first.files
    assert ids_of(second) == list(range(40))
    assert cached_shards(rows, root, key="v1") == second


@spark_test
def test_concurrent_writers_of_one_key_all_succeed(spark: Any, root: str) -> None:
    gate = threading.Barrier(3)

    def write(_: int) -> ShardManifest:
        gate.wait()
        return cached_shards(spark.range(40), root, key="v1")

    with ThreadPoolExecutor(3) as pool:
        manifests = list(pool.map(write, range(3)))
    for manifest in manifests:
        manifest.verify_files()
        assert ids_of(manifest) == list(range(40))
    assert len(list_cached(root)) == 1
    assert cached_shards(spark.range(40), root, key="v1") in manifests


@spark_test
def test_a_refused_write_leaves_no_entry(spark: Any, root: str) -> None:
    rows = spark.range(40).selectExpr("id", "id * 2 AS x")
    for given, changes, message in (
        (rows, {"row_group_rows": 0}, "row_group_rows must be at least 1"),
        (rows, {"overwrite": True}, "takes no 'overwrite'"),
        (rows, {"key": ""}, r"key must be a text .*, got ''"),
        (spark.readStream.format("rate").load(), {}, "takes a batch DataFrame"),
    ):
        with pytest.raises(ValueError, match=message):
            cached_shards(given, root, **{"key": "v1"} | changes)
    assert list_cached(root) == []


@spark_test
def test_entries_are_listed_and_removed_and_nothing_else(spark: Any, root: str) -> None:
    rows = spark.range(40).selectExpr("id", "id * 2 AS x")
    first = cached_shards(rows.select("id"), root, key="v1")
    second = cached_shards(rows, root, key="v2")
    mine = [Path(root) / "notes.txt", Path(root) / ("a" * DIGITS) / "mine", Path(first.uri) / "mine"]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("a user's file")
    entries = {entry.uri: entry for entry in list_cached(root)}
    assert entries.keys() == {first.uri, second.uri}
    assert entries[second.uri].columns == ("id", "x")
    assert entries[first.uri].rows == 40
    assert entries[first.uri].key == "v1"
    assert entries[first.uri].created.endswith("+00:00")
    with pytest.raises(ValueError, match=r"no entry has the key 'v' .*pass one of: v1, v2"):
        remove_cached(root, "v")
    assert remove_cached(root, "v1") == entries[first.uri].num_bytes
    assert [entry.uri for entry in list_cached(root)] == [second.uri]
    second.verify_files()
    assert remove_cached(root) > 0
    assert remove_cached(root) == 0
    assert [path.read_text() for path in mine] == ["a user's file"] * 3
    assert {path for path in Path(root).rglob("*") if path.is_file()} == set(mine)


@pytest.mark.parametrize("num_removed", range(4))
def test_an_interrupted_removal_leaves_no_entry_to_serve_and_one_to_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_removed: int
) -> None:
    folder = tmp_path / ("1" * DIGITS)
    for name in ("_shards-1", "_shards-2"):
        (folder / name).mkdir(parents=True)
        (folder / name / "part.parquet").write_bytes(b"rows")
    cache_entries.mark(str(folder), "v1")
    (folder / "manifest.json").write_text("{}")
    removed: list[str] = []
    remove = storage.remove

    def remove_some(uri: str, *, recursive: bool = False) -> None:
        if len(removed) == num_removed:
            raise OSError("the store does not answer")
        removed.append(uri)
        remove(uri, recursive=recursive)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "remove", remove_some)
        with pytest.raises(OSError, match="does not answer"):
            remove_cached(tmp_path)
    assert (folder / "manifest.json").exists() == (num_removed == 0)
    assert [listed.key for listed in list_cached(tmp_path)] == ["v1"]
    remove_cached(tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("store", ["", "memory://"])
def test_file_states_are_read_anew(tmp_path: Path, store: str) -> None:
    file = fsspec.filesystem(store.removesuffix("://") or "file")
    path = f"{store}{tmp_path}/a b%41.bin"
    file.pipe_file(path, b"one")
    (before,) = path_states([path])
    assert before[:2] == (path, 3)
    assert path_states([path]) == (before,)
    file.pipe_file(path, b"two")
    assert path_states([path]) != (before,)
    file.rm(path)
    with pytest.raises(FileNotFoundError):
        path_states([path])
