"""Shards are reused for the same rows only.

Each write uses its own folder, so the folder of the returned shards shows whether a write took place.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ringspark.extras.reuse import cache_entries
from ringspark.extras.reuse import cached_shards as module
from ringspark.extras.reuse.cache_entries import ENTRY_NAME, KEY_DIGITS, MARKER_NAME
from ringspark.extras.reuse.cached_shards import rows_key
from ringspark.pipelines import (
    ShardManifest,
    Tokens,
    cached_shards,
    list_cached,
    open_reader,
    remove_cached,
    storage,
    write_shards,
)
from ringspark.pipelines.plan_fingerprint import judge
from ringspark.pipelines.source_files import file_states

spark_test = pytest.mark.spark


def write_source(path: Path, first: int = 0, rows: int = 40) -> None:
    """Writes a Parquet file in row groups of 20; its size depends only on the number of rows."""
    ids = np.arange(first, first + rows, dtype=np.int64)
    texts = pa.array([f"t{number % 3}" for number in range(rows)])
    table = pa.table({"id": ids, "x": ids / 2, "s": texts})
    pq.write_table(table, path, compression="none", use_dictionary=False, row_group_size=20)


def ids_of(manifest: ShardManifest) -> list[int]:
    batches = open_reader(manifest, engine="arrow", shuffle=False).batches(0)
    return sorted(int(value) for batch in batches for value in batch["id"])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with one Parquet file, whose name Spark percent-encodes."""
    folder = tmp_path / "the source 100%"
    folder.mkdir()
    write_source(folder / "part 1.parquet")
    return folder


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "cache")


# ------------------------------------------------------------------------------ reuse


@pytest.mark.slow
@spark_test
@pytest.mark.modes
def test_the_same_query_built_twice_is_written_once(spark: Any, source: Path, root: str) -> None:
    def build() -> Any:
        rows = spark.read.parquet(str(source)).where("id >= 4 and s = 't1'")
        return rows.selectExpr("id", "x * 2 as y").union(spark.range(3).selectExpr("id", "0D as y"))

    first = cached_shards(build(), root, num_files=2)
    files = {path: path.stat().st_mtime_ns for path in Path(root).rglob("*") if path.is_file()}
    second = cached_shards(build(), root, num_files=2)
    assert second == first
    assert {path: path.stat().st_mtime_ns for path in Path(root).rglob("*") if path.is_file()} == files
    assert ids_of(second) == [0, 1, 2, *range(4, 40, 3)]


@spark_test
@pytest.mark.modes
def test_other_rows_columns_or_settings_are_another_entry(spark: Any, source: Path, root: str) -> None:
    rows = spark.read.parquet(str(source)).select("id", "x", (spark_lit("id") % 5).alias("part"))
    variants = [
        (rows, {}),
        (rows.select("id", "x"), {}),
        (rows.select("x", "id"), {}),
        (rows.select("id", rows.x.alias("z")), {}),
        (rows.where("id > 3"), {}),
        (rows.where("id > 4"), {}),
        (rows.where("id > 4").where("part < 2"), {}),
        (rows, {"row_group_rows": 8}),
        (rows, {"row_group_rows": 9}),
        (rows.select("id", (rows.part < 1).alias("held_out")), {"validation_col": "held_out"}),
    ]
    uris = [cached_shards(df, root, **settings).uri for df, settings in variants]
    assert len(set(uris)) == len(variants)
    assert [cached_shards(df, root, **settings).uri for df, settings in variants[:3]] == uris[:3]


@spark_test
def test_tokenizers_of_equal_length_are_another_entry(spark: Any, source: Path, root: str) -> None:
    from tokenizers import Tokenizer, models

    rows = spark.read.parquet(str(source)).select("s")

    def ids(vocabulary: dict[str, int]) -> set[int]:
        tokens = Tokens.of(Tokenizer(models.WordLevel(vocabulary, unk_token="?")), max_length=1)
        reader = open_reader(cached_shards(rows, root, columns={"s": tokens}), engine="arrow", shuffle=False)
        return {int(number) for batch in reader.batches(0) for number in batch["s.ids"].ravel()}

    assert ids({"?": 0, "t0": 1, "t1": 2, "t2": 3}) == {1, 2, 3}
    # The repr of Tokens shows only the length of the tokenizer's text, and this text has the same length.
    assert ids({"?": 0, "u0": 1, "u1": 2, "u2": 3}) == {0}


def spark_lit(name: str) -> Any:
    from pyspark.sql import functions as F

    return F.col(name)


@spark_test
@pytest.mark.modes
def test_a_file_overwritten_in_place_or_appended_is_never_served_stale(
    spark: Any, source: Path, root: str
) -> None:
    def build() -> Any:
        return spark.read.parquet(str(source)).select("id")

    path = source / "part 1.parquet"
    assert ids_of(cached_shards(build(), root)) == list(range(40))
    stat = path.stat()
    write_source(path, first=100)
    # Same size and same modification time: rsync and tar restore modification times.
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_size == stat.st_size
    assert ids_of(cached_shards(build(), root)) == list(range(100, 140))
    write_source(source / "part 2.parquet", first=200, rows=5)
    assert ids_of(cached_shards(build(), root)) == [*range(100, 140), *range(200, 205)]
    assert len(list_cached(root)) == 3


@spark_test
def test_a_dataframe_older_than_its_files_is_not_reused(
    spark: Any, source: Path, root: str, caplog: pytest.LogCaptureFixture
) -> None:
    if ".connect." in type(spark).__module__:
        pytest.skip("Spark Connect lists the files for every action")
    old = spark.read.parquet(str(source)).select("id")
    write_source(source / "part 1.parquet", rows=400)
    # Spark's old file listing makes it read only the start of the file. No other DataFrame may get these
    # shards.
    assert cached_shards(old, root).num_rows < 400
    assert "create the DataFrame again" in caplog.text
    fresh = spark.read.parquet(str(source)).select("id")
    assert ids_of(cached_shards(fresh, root)) == list(range(400))


@spark_test
@pytest.mark.modes
@pytest.mark.parametrize("name", ["spark.sql.session.timeZone", "spark.sql.ansi.enabled"])
def test_a_session_that_computes_otherwise_is_another_entry(
    spark: Any, source: Path, root: str, name: str
) -> None:
    df = spark.read.parquet(str(source)).selectExpr("hour(timestamp_seconds(id * 4000)) as id")
    first = cached_shards(df, root)
    old = spark.conf.get(name)
    try:
        spark.conf.set(name, {"true": "false", "false": "true"}.get(old, "Asia/Kathmandu"))
        df = spark.read.parquet(str(source)).selectExpr("hour(timestamp_seconds(id * 4000)) as id")
        assert cached_shards(df, root).uri != first.uri
    finally:
        spark.conf.set(name, old)


@spark_test
@pytest.mark.modes
def test_options_of_a_reader_that_no_plan_prints_are_told_apart(
    spark: Any, tmp_path: Path, root: str
) -> None:
    (tmp_path / "t.csv").write_text("".join(f"{n}\n" for n in range(10)))

    def build(header: bool) -> Any:
        return spark.read.schema("id int").option("header", header).csv(str(tmp_path / "t.csv"))

    with_header = cached_shards(build(True), root)
    assert (with_header.num_rows, cached_shards(build(False), root).num_rows) == (9, 10)
    # Connect does not expose the options, so it writes again.
    assert (cached_shards(build(True), root) == with_header) == (".connect." not in type(spark).__module__)


@spark_test
@pytest.mark.modes
def test_options_and_folders_of_one_hash_are_told_apart(spark: Any, tmp_path: Path, root: str) -> None:
    # Java's hashes of "Aa" and "BB" are equal, so Spark's hashes of plans with them are equal too.
    (tmp_path / "t.csv").write_text("Aa\nBB\nx\n")
    for first, name in ((0, "Aa"), (100, "BB")):
        (tmp_path / name).mkdir()
        write_source(tmp_path / name / "part.parquet", first=first)

    def as_null(text: str) -> Any:
        rows = spark.read.schema("s string").option("nullValue", text).csv(str(tmp_path / "t.csv"))
        return rows.selectExpr("length(coalesce(s, 'a null')) as n")

    def pair(one: str, other: str) -> Any:
        read = spark.read.parquet
        rows = read(str(tmp_path / one)).where("id % 100 < 3")
        return rows.union(read(str(tmp_path / other)).where("id % 100 >= 3")).select("id")

    for one, other in ((as_null("Aa"), as_null("BB")), (pair("Aa", "BB"), pair("BB", "Aa"))):
        assert one.semanticHash() == other.semanticHash()
        assert cached_shards(one, root) != cached_shards(other, root)


@spark_test
def test_literals_that_print_alike_are_told_apart(spark: Any, source: Path, root: str) -> None:
    rows = spark.read.parquet(str(source))
    two = cached_shards(rows.where("s in ('t1', 't2')").select("id"), root)
    with pytest.raises(ValueError, match="no training rows"):
        cached_shards(rows.where("s in ('t1,t2')").select("id"), root)
    assert cached_shards(rows.where("s in ('t1', 't2')").select("id"), root) == two


@spark_test
def test_a_wide_plan_is_told_apart_to_its_last_column(spark: Any, source: Path, root: str) -> None:
    rows = spark.read.parquet(str(source))
    columns = [f"id + {number} as c{number}" for number in range(60)]
    before = spark.conf.get("spark.sql.debug.maxToStringFields", None)
    first = cached_shards(rows.selectExpr(*columns), root)
    assert cached_shards(rows.selectExpr(*columns), root) == first
    assert cached_shards(rows.selectExpr(*columns[:-1], "id + 0 as c59"), root).uri != first.uri
    assert spark.conf.get("spark.sql.debug.maxToStringFields", None) == before


@spark_test
@pytest.mark.modes
def test_plans_of_one_semantic_hash_are_told_apart(spark: Any, source: Path, root: str) -> None:
    # Scala's hashes of 3 and -4 are equal, and a renamed column keeps its semantic hash.
    rows = spark.read.parquet(str(source))
    pairs = [
        [rows.where(f"id > {least}L").select("id") for least in (3, -4)],
        [rows.selectExpr(f"id as {name}") for name in ("a", "b")],
    ]
    for first, second in pairs:
        assert first.semanticHash() == second.semanticHash()
        assert cached_shards(first, root) != cached_shards(second, root)


@spark_test
def test_another_application_writes_anew(spark: Any, source: Path, root: str, tmp_path: Path) -> None:
    rows = spark.read.parquet(str(source)).select("id")
    known = rows_key(rows, seed=1)
    assert known == rows_key(spark.read.parquet(str(source)).select("id"), seed=1)
    assert known != rows_key(rows, seed=2)
    application = spark.conf.get("spark.app.id")
    try:
        spark.conf.set("spark.app.id", "app-2")
        assert rows_key(rows, seed=1) != known
    finally:
        spark.conf.set("spark.app.id", application)


# ------------------------------------------------------------------------------ no reuse


def _udf(df: Any) -> Any:
    from pyspark.sql import functions as F

    return df.select(F.udf(lambda value: value + 1, "long")("id").alias("id"))


def _udf_named_like_a_function(df: Any) -> Any:
    from pyspark.sql import functions as F

    def upper(value: int) -> int:
        return value + 1

    return df.select(F.udf(upper, "long", useArrow=False)("id").alias("id"))


NEVER: dict[str, tuple[Callable[[Any], Any], str]] = {
    "rand": (lambda df: df.selectExpr("id", "rand() as r"), "calls 'rand'"),
    "seeded": (lambda df: df.selectExpr("id", "rand(7) as r"), "calls 'rand'"),
    "sample": (lambda df: df.sample(0.9, seed=3), "it takes a sample"),
    "clock": (
        lambda df: df.selectExpr("id", "unix_timestamp(current_timestamp()) as t"),
        "calls 'current_timestamp'",
    ),
    "now": (lambda df: df.where("now() > timestamp'2020-01-01 00:00:00'"), "calls 'now'"),
    "today": (lambda df: df.where("cast('today' as date) > date'2020-01-01'"), "today's date"),
    "uuid": (lambda df: df.selectExpr("id", "length(uuid()) as u"), "calls 'uuid'"),
    "row ids": (lambda df: df.selectExpr("monotonically_increasing_id() as id"), "monotonically"),
    "partitions": (lambda df: df.selectExpr("id", "spark_partition_id() as p"), "SPARK_PARTITION_ID"),
    "udf": (_udf, "Python function"),
    "udf upper": (_udf_named_like_a_function, "Python function"),
    "map": (lambda df: df.mapInArrow(lambda batches: batches, "id long"), "MapInArrow"),
    "subquery": (lambda df: df.where("id <= (select max(id) from range(99))"), "subquery"),
}

# The fast ones: an expression, a node of the plan, a function of Python. `judge` decides all of them alike.
MARKS: dict[str, Any] = {"clock": pytest.mark.modes, "udf": pytest.mark.modes, "rand": (), "sample": ()}


@spark_test
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=MARKS.get(name, pytest.mark.slow)) for name in NEVER],
)
def test_rows_that_may_differ_next_time_are_written_anew(
    spark: Any, source: Path, root: str, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    build, reason = NEVER[name]
    with caplog.at_level(logging.WARNING):
        uris = {cached_shards(build(spark.read.parquet(str(source)).select("id")), root).uri for _ in "12"}
    assert len(uris) == 2
    assert reason in caplog.text
    # The cache lists both writes with the reason.
    listed = list_cached(root)
    assert {entry.uri for entry in listed} == uris
    assert not any(entry.is_reusable for entry in listed)
    assert reason in listed[0].plan


@spark_test
@pytest.mark.modes
def test_two_dataframes_in_memory_are_never_confused(spark: Any, root: str) -> None:
    for first in (0, 1000, 2000):
        # The plan is the same, and often also id(), because the first DataFrame was garbage-collected.
        df = spark.createDataFrame([(first + number,) for number in range(4)], ["id"])
        assert ids_of(cached_shards(df, root)) == list(range(first, first + 4))


@spark_test
@pytest.mark.modes
def test_what_spark_has_cached_is_never_reused(
    spark: Any, source: Path, root: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows = spark.read.parquet(str(source)).select("id")
    rows.collect()
    assert cached_shards(rows, root) == cached_shards(rows, root)
    rows.cache()
    try:
        assert cached_shards(rows, root).uri != cached_shards(rows, root).uri
        assert "cached in Spark" in caplog.text
    finally:
        rows.unpersist()


@spark_test
def test_other_sources_are_never_reused(spark: Any, source: Path, tmp_path: Path, root: str) -> None:
    (tmp_path / "t.txt").write_text("1\n2\n")
    df = spark.read.text(str(tmp_path / "t.txt")).selectExpr("cast(value as int) as id")
    assert cached_shards(df, root).uri != cached_shards(df, root).uri
    assert "reads text" in list_cached(root)[0].plan


@spark_test
def test_a_source_that_changes_during_the_write_is_not_served(
    spark: Any, source: Path, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_and_touch(*args: Any, **settings: Any) -> ShardManifest:
        manifest = write_shards(*args, **settings)
        os.utime(source / "part 1.parquet")
        return manifest

    rows = spark.read.parquet(str(source)).select("id")
    monkeypatch.setattr(module, "write_shards", write_and_touch)
    first = cached_shards(rows, root)
    monkeypatch.undo()
    assert [entry.plan for entry in list_cached(root)] == ["not reused: its source changed during the write"]
    second = cached_shards(rows, root)
    assert second.uri != first.uri
    assert cached_shards(rows, root) == second


# ------------------------------------------------------------------------------ writers and faults


@spark_test
def test_an_interrupted_write_is_never_served(
    spark: Any, source: Path, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = spark.read.parquet(str(source)).select("id")

    def die(*args: Any, **settings: Any) -> ShardManifest:
        write_shards(*args, **settings)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_shards", die)
        with pytest.raises(KeyboardInterrupt):
            cached_shards(rows, root)
        assert list_cached(root) == []
        # A killed process cleans up nothing.
        patch.setattr(module.cache_entries, "abandon", lambda *args: None)
        with pytest.raises(KeyboardInterrupt):
            cached_shards(rows, root)
    (left,) = list_cached(root)
    assert left.plan.startswith("unfinished")
    assert left.num_bytes > 0
    assert not left.is_reusable
    (run,) = Path(left.uri).glob("run-*")
    manifest = cached_shards(rows, root)
    assert manifest.uri != str(run)
    assert cached_shards(rows, root) == manifest
    assert remove_cached(root) > 0
    assert os.listdir(root) == []


@spark_test
@pytest.mark.parametrize("fault", ["cut", "gone", "manifest", "entry"])
def test_a_damaged_entry_is_written_again(spark: Any, source: Path, root: str, fault: str) -> None:
    rows = spark.read.parquet(str(source)).select("id")
    first = cached_shards(rows, root)
    file = Path(first.uri) / first.files[0].path
    if fault == "cut":
        file.write_bytes(file.read_bytes()[:-10])
    elif fault == "gone":
        file.unlink()
    elif fault == "manifest":
        (Path(first.uri) / "manifest.json").unlink()
    else:
        (Path(first.uri).parent / ENTRY_NAME).write_text("{")
    second = cached_shards(rows, root)
    assert second.uri != first.uri
    assert ids_of(second) == list(range(40))
    assert cached_shards(rows, root) == second


@spark_test
def test_concurrent_writers_of_one_key_all_succeed(spark: Any, source: Path, root: str) -> None:
    gate = threading.Barrier(3)

    def write(_: int) -> ShardManifest:
        gate.wait()
        return cached_shards(spark.read.parquet(str(source)).select("id"), root)

    with ThreadPoolExecutor(3) as pool:
        manifests = list(pool.map(write, range(3)))
    for manifest in manifests:
        manifest.verify_files()
        assert ids_of(manifest) == list(range(40))
    assert len(list_cached(root)) == 1
    assert cached_shards(spark.read.parquet(str(source)).select("id"), root) in manifests


@spark_test
def test_a_refused_write_leaves_no_entry(spark: Any, source: Path, root: str) -> None:
    rows = spark.read.parquet(str(source))
    with pytest.raises(ValueError, match="row_group_rows must be at least 1"):
        cached_shards(rows.select("id"), root, row_group_rows=0)
    with pytest.raises(ValueError, match="takes no 'overwrite'"):
        cached_shards(rows.select("id"), root, overwrite=True)
    with pytest.raises(ValueError, match="takes a batch DataFrame"):
        cached_shards(spark.readStream.format("rate").load(), root)
    assert list_cached(root) == []


@spark_test
def test_entries_are_listed_and_removed_and_nothing_else(spark: Any, source: Path, root: str) -> None:
    rows = spark.read.parquet(str(source))
    first = cached_shards(rows.select("id"), root)
    second = cached_shards(rows.select("id", "x"), root)
    mine = [
        Path(root) / "notes.txt",
        Path(root) / ("a" * KEY_DIGITS) / "mine",
        Path(first.uri).parent / "mine",
    ]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("a user's file")
    entries = {entry.uri: entry for entry in list_cached(root)}
    assert entries.keys() == {first.uri, second.uri}
    assert entries[second.uri].columns == ("id", "x")
    assert entries[first.uri].rows == 40
    assert entries[first.uri].plan.startswith("Project < Relation")
    assert entries[first.uri].created.endswith("+00:00")
    stored = json.loads((Path(first.uri).parent / ENTRY_NAME).read_text())
    assert "1 files" in stored["sources"]
    assert stored["plan"].startswith("Project [id#0L]\n+- Relation [id#0L,x#1,s#2] parquet")

    for prefix in ("zz", ""):
        with pytest.raises(ValueError, match=f"no entry has a key that starts with '{prefix}'"):
            remove_cached(root, prefix)
    assert remove_cached(root, entries[first.uri].key[:KEY_DIGITS]) == entries[first.uri].num_bytes
    assert [entry.uri for entry in list_cached(root)] == [second.uri]
    second.verify_files()
    assert remove_cached(root) > 0
    assert remove_cached(root) == 0
    assert [path.read_text() for path in mine] == ["a user's file"] * 3
    assert {path for path in Path(root).rglob("*") if path.is_file()} == set(mine)


def test_a_prefix_of_several_keys_is_refused(tmp_path: Path) -> None:
    for key in ("1" * KEY_DIGITS, "1" * (KEY_DIGITS - 1) + "2"):
        (tmp_path / key).mkdir()
        (tmp_path / key / MARKER_NAME).write_text(key)
    with pytest.raises(ValueError, match="several entries have keys that start with '11'"):
        remove_cached(tmp_path, "11")
    assert len(list_cached(tmp_path)) == 2


@pytest.mark.parametrize("num_removed", range(4))
def test_an_interrupted_removal_leaves_no_entry_to_serve_and_one_to_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_removed: int
) -> None:
    key = "1" * KEY_DIGITS
    for _ in range(2):
        run = cache_entries.begin(tmp_path, key)
        (tmp_path / key / run).mkdir()
        (tmp_path / key / run / "part.parquet").write_bytes(b"rows")
    manifest = ShardManifest(uri=str(tmp_path / key / run), columns=(), files=())
    entry = cache_entries.CacheEntry(
        key=key, run=run, refusal=None, plan="", plan_summary="", settings="", sources=""
    )
    cache_entries.publish(tmp_path, entry, manifest)
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
    served = cache_entries.load_entry(str(tmp_path / key))
    assert (served is None) == (num_removed > 0)
    assert [listed.key for listed in list_cached(tmp_path)] == [key]
    remove_cached(tmp_path)
    assert os.listdir(tmp_path) == []


# ------------------------------------------------------------------------------ without Spark


def explained(*plan: str, physical: str = "FileScan Location: InMemoryFileIndex(1 paths)[file:/x]") -> str:
    name = "_pyspark_" + "0" * 32
    view = ["Project [id#1L]", f"+- SubqueryAlias {name}", f"   +- View (`{name}`, [id#1L])"]
    below = ["   " * (depth + 2) + "+- " + line for depth, line in enumerate(plan)]
    analysed = "\n".join(["id: bigint", *view, *below])
    optimised = "\n".join(line for line in plan if line.startswith("Relation"))
    return (
        f"== Parsed Logical Plan ==\n'Project [*]\n\n== Analyzed Logical Plan ==\n{analysed}\n\n"
        f"== Optimized Logical Plan ==\n{optimised}\n\n== Physical Plan ==\n{physical}\n"
    )


def test_expression_ids_are_numbered_by_first_appearance() -> None:
    texts = {
        judge(explained(f"Filter (b#{n}L > id#{m}L)", f"Relation [id#{m}L,b#{n}L] parquet"), "").text
        for n, m in ((7, 3), (107, 12))
    }
    assert texts == {"Filter (b#0L > id#1L)\n+- Relation [id#1L,b#0L] parquet"}


@pytest.mark.parametrize(
    ("plan", "physical", "reason"),
    [
        (["LogicalRDD [id#1L], false"], "Scan ExistingRDD[id#1L]", "LogicalRDD"),
        (["Relation [id#1L] JDBCRelation(t) [numPartitions=1]"], "Scan JDBC", "it reads"),
        (
            ["Project [UDF(id#1L) AS v#2]", "Relation [id#1L] parquet"],
            "Location: InMemoryFileIndex(",
            "'UDF'",
        ),
        (["Relation [id#1L] parquet"], "FileScan Location: TahoeLogFileIndex(1 paths)", "TahoeLogFileIndex"),
        (["Relation [id#1L, ... 3 more fields] parquet"], "Location: InMemoryFileIndex(", "shortened"),
    ],
)
def test_plans_of_libraries_that_are_not_here_are_refused(
    plan: list[str], physical: str, reason: str
) -> None:
    refusal = judge(explained(*plan, physical=physical), "").refusal
    assert refusal is not None
    assert reason in refusal


def test_file_states_are_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "a b%41.bin"
    path.write_bytes(b"one")
    (before,) = file_states([path.as_uri()])
    assert before[:2] == (str(path), 3)
    path.write_bytes(b"two")
    assert file_states([path.as_uri()]) != (before,)
    with pytest.raises(FileNotFoundError):
        file_states([(tmp_path / "gone").as_uri()])


@pytest.fixture
def memory_file() -> Iterator[str]:
    import fsspec

    fs = fsspec.filesystem("memory")
    fs.pipe_file("/reuse/a b.bin", b"one")
    yield "memory://reuse/a%20b.bin"
    fs.rm("/reuse", recursive=True)


def test_files_of_other_storage_are_told_apart_by_their_marks(memory_file: str) -> None:
    import fsspec

    (before,) = file_states([memory_file])
    assert (before[0], before[1]) == ("memory://reuse/a b.bin", 3)
    assert file_states([memory_file]) == (before,)
    fsspec.filesystem("memory").pipe_file("/reuse/a b.bin", b"two")
    assert file_states([memory_file]) != (before,)


def test_settings_are_compared_by_value_not_by_order() -> None:
    assert module._canonical({"b": {"y": 1, "x": (2,)}, "a": {3, 1}}) == module._canonical(
        {"a": {1, 3}, "b": {"x": (2,), "y": 1}}
    )
    assert module._canonical({"a": 1}) != module._canonical({"a": "1"})
