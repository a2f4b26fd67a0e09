"""External tables through the readers: every guarantee for shards also holds for tables in any layout."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions as F

from ringspark.extras.external_tables import footers, list_parquet, table_manifest
from ringspark.extras.external_tables import manifest as manifest_module
from ringspark.extras.external_tables.in_place.delta import list_delta
from ringspark.pipelines import (
    HashBuckets,
    Padded,
    Ragged,
    ShardManifest,
    Sparse,
    Vocabulary,
    open_reader,
    write_shards,
)

pytestmark = [pytest.mark.spark, pytest.mark.extras]


def _rows(first: int, rows: int) -> Any:
    ids = np.arange(first, first + rows)
    return pa.table({"id": ids, "half": ids / 2})


def _single_rows(folder: Path) -> int:
    pq.write_table(_rows(0, 40), folder / "a.parquet", row_group_size=1)
    pq.write_table(_rows(40, 17), folder / "b.parquet", row_group_size=1, compression="zstd")
    return 57


def _thousands(folder: Path) -> int:
    pq.write_table(_rows(0, 4_500), folder / "a.parquet", row_group_size=1_000)
    pq.write_table(_rows(4_500, 2_500), folder / "b.parquet", row_group_size=1_000)
    return 7_000


def _one_large(folder: Path) -> int:
    pq.write_table(_rows(0, 130_007), folder / "a.parquet", row_group_size=1 << 20)
    return 130_007


def _a_litter(folder: Path) -> int:
    """Writes files without rows or bytes, an empty row group, hidden files, nested folders, another column
    order.
    """
    pq.write_table(_rows(0, 500).select(["half", "id"]), folder / "a.parquet", compression="gzip")
    pq.write_table(_rows(0, 0), folder / "b.parquet")
    with pq.ParquetWriter(folder / "c.parquet", _rows(0, 0).schema, use_dictionary=False) as writer:
        for part in (_rows(500, 7), _rows(0, 0), _rows(507, 45_000)):
            writer.write_table(part, row_group_size=1 << 20)
    (folder / "empty.parquet").touch()
    for hidden in ("_SUCCESS", ".c.parquet.crc", "_temporary/0/d.parquet", ".hidden/e.parquet"):
        (folder / hidden).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "a.parquet", folder / hidden)
    return 45_507


def _folders(folder: Path) -> int:
    for number, name in enumerate(
        ("day=2024-01-01/part=7", "day=2024-01-02/part=8", "day=2024-01-02/part=9")
    ):
        (folder / name).mkdir(parents=True)
        pq.write_table(_rows(300 * number, 300), folder / name / "a.parquet", row_group_size=70)
    return 900


Layout = Callable[[Path], int]
LAYOUTS: list[Layout] = [_single_rows, _thousands, _one_large, _a_litter, _folders]


def _steps(
    manifest: ShardManifest, shards: int, batch_size: int, start_step: int = 0, **settings: Any
) -> list[Any]:
    """Returns the sorted ids of every step, over all shards."""
    readers = [
        open_reader(manifest, ["id", "half"], shard, shards, batch_size, engine="arrow", **settings)
        for shard in range(shards)
    ]
    batches = zip(*(reader.batches(1, start_step) for reader in readers), strict=True)
    steps = []
    for step in batches:
        ids = np.concatenate([batch["id"] for batch in step])
        assert np.array_equal(np.concatenate([batch["half"] for batch in step]), ids / 2)
        steps.append(np.sort(ids))
    return steps


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_every_row_comes_once_in_the_same_step_for_any_number_of_workers(
    spark: Any, tmp_path: Path, layout: Layout
) -> None:
    rows = layout(tmp_path)
    manifest = table_manifest(spark, list_parquet(spark, str(tmp_path)), ["id", "half"])
    assert manifest.num_rows == manifest.stats["train"]["id"].rows == rows
    assert max(manifest.row_groups) < 2 * manifest_module.WINDOW_ROWS
    size = 7 if rows < 100 else 97
    steps = _steps(manifest, 1, size)
    assert np.array_equal(np.sort(np.concatenate(steps)), np.arange(rows))
    assert not np.array_equal(np.concatenate(steps), np.arange(rows))
    assert all(len(step) == size for step in steps[:-1])
    for shards in (2, 3):
        again = _steps(manifest, shards, size)
        assert all(map(np.array_equal, steps, again))
    # Resumes in the middle of the epoch with another number of workers.
    middle = len(steps) // 2
    rest = _steps(manifest, 2, size, start_step=middle)
    assert len(rest) == len(steps) - middle
    assert all(map(np.array_equal, steps[middle:], rest))
    assert np.array_equal(np.concatenate(_steps(manifest, 3, size, shuffle=False)), np.arange(rows))


@pytest.mark.slow
def test_a_row_group_of_ten_million_rows_is_read_by_its_pages(spark: Any, tmp_path: Path) -> None:
    rows = 10_000_000
    pq.write_table(_rows(0, rows), tmp_path / "a.parquet", row_group_size=rows)
    manifest = table_manifest(spark, list_parquet(spark, str(tmp_path)))
    assert manifest.row_groups == (20_000,) * 500
    alone = _steps(manifest, 1, batch_size=65_536)
    assert np.array_equal(np.sort(np.concatenate(alone)), np.arange(rows))
    for shards in (2, 3):
        assert all(map(np.array_equal, alone, _steps(manifest, shards, batch_size=65_536)))


def _all_types(spark: Any) -> Any:
    number = F.col("id")
    return spark.range(0, 700, 1, 1).select(
        number.alias("id"),
        (number % 100 - 50).cast("byte").alias("byte"),
        (number / 7).alias("double"),
        (number / 7).cast("float").alias("float"),
        (number % 3 == 0).alias("flag"),
        (number / 7).cast("decimal(15,7)").alias("decimal"),
        F.date_from_unix_date(number.cast("int") * 11 - 4000).alias("day"),
        F.timestamp_micros(number * 1_000_003 - 10**8).alias("time"),
        F.array(number / 3, number * 2.0).alias("pair"),
        F.array(F.array(number, -number), F.array(number + 1, number)).alias("grid"),
        F.slice(F.array(*map(F.lit, range(1, 6))), 1, (number % 5 + 1).cast("int")).alias("ragged"),
        F.concat(F.lit("é"), number % 13, F.repeat(F.lit("x"), (number % 90).cast("int"))).alias("hashed"),
        F.concat(F.lit("word"), F.pow(number % 5, 2)).alias("word"),
        (number % 2).alias("folder"),
        F.concat(F.lit("a b/%:"), number % 2 + 1).alias("named"),
    )


KINDS = {
    "hashed": HashBuckets(1_000, seed=-3),
    "word": Vocabulary(max_size=3),
    "named": Vocabulary(),
    "ragged": Padded(),
    "sparse": Sparse(),
}


def _values(manifest: ShardManifest) -> dict[str, Any]:
    """Returns all rows, sorted by id."""
    batches = list(open_reader(manifest, batch_size=64, shuffle=False, engine="arrow").batches(0))
    for batch in batches:  # CSR, compared as dense rows
        if "sparse.indptr" in batch:
            indptr, indices, data = (batch.pop(f"sparse.{part}") for part in ("indptr", "indices", "data"))
            dense = np.zeros((len(indptr) - 1, 8), dtype=data.dtype)
            dense[np.repeat(np.arange(len(dense)), np.diff(indptr)), indices] = data
            batch["sparse"] = dense
    joined = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    order = np.argsort(joined["id"], kind="stable")
    return {name: values[order] for name, values in joined.items()}


@pytest.mark.slow
def test_every_kind_has_the_numbers_and_statistics_that_write_shards_stores(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest_module, "WINDOW_ROWS", 60)
    vectors = spark.createDataFrame(
        [
            (n, Vectors.dense([n / 3] * 8), Vectors.sparse(8, [n % 8], [1.0 * n]))
            if n % 2
            else (n, Vectors.sparse(8, [1, 5], [n * 1.1, -1e300]), Vectors.sparse(8, [0, 3], [2.0, n]))
            for n in range(700)
        ],
        ["id", "vector", "sparse"],
    )
    frame = _all_types(spark).join(vectors, "id").orderBy("id").coalesce(1)
    root = str(tmp_path / "table")
    frame.write.option("parquet.page.size", 2_000).option("parquet.page.row.count.limit", 50).partitionBy(
        "folder", "named"
    ).parquet(root)
    read = spark.read.parquet(root)
    wanted = write_shards(read, str(tmp_path / "shards"), columns=KINDS)
    found = table_manifest(spark, list_parquet(spark, root), kinds=KINDS)
    assert found.columns == wanted.columns
    assert max(found.row_groups) < 120 <= max(max(file.row_groups) for file in found.files)
    left, right = _values(found), _values(wanted)
    assert left.keys() == right.keys()
    for name, values in right.items():
        assert left[name].dtype == values.dtype, name
        assert np.array_equal(left[name], values), name
    for name, stats in wanted.stats["train"].items():
        same = found.stats["train"][name]
        assert (same.rows, same.values, same.minimum, same.maximum, same.fractional, same.infs) == (
            (stats.rows, stats.values, stats.minimum, stats.maximum, stats.fractional, stats.infs)
        ), name
        assert same.mean == pytest.approx(stats.mean, rel=1e-12)
        assert same.std == pytest.approx(stats.std, rel=1e-9)


@pytest.mark.slow
def test_what_pandas_writes_is_read_as_spark_reads_it(spark: Any, tmp_path: Path) -> None:
    rows = 50
    numbers = np.arange(rows)
    table = pa.table(
        {
            "id": numbers,
            "small": pa.array(numbers, pa.uint8()),
            "large": pa.array(numbers * 7, pa.uint32()),
            "category": pa.array([f"c{n % 3}" for n in numbers]).dictionary_encode(),
            "wide": pa.array([f"w{n % 2}" for n in numbers], pa.large_string()),
            "fixed": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(rows * 2.0)), 2),
            "grid": pa.ListArray.from_arrays(
                pa.array(np.arange(rows + 1) * 2, pa.int32()),
                pa.FixedSizeListArray.from_arrays(pa.array(np.arange(rows * 6.0)), 3),
            ),
            "time": pa.array(numbers * 10**6, pa.timestamp("us", "UTC")),
            "old": pa.array(numbers * 10**9, pa.timestamp("ns")),
        }
    )
    plain = table.drop_columns(["old"])
    (tmp_path / "t").mkdir()
    pq.write_table(table, tmp_path / "t" / "a.parquet", use_deprecated_int96_timestamps=True)
    kinds = {"category": Vocabulary(), "wide": HashBuckets(9)}
    assert "old" not in plain.column_names
    found = table_manifest(spark, list_parquet(spark, str(tmp_path / "t")), kinds=kinds)
    wanted = write_shards(spark.read.parquet(str(tmp_path / "t")), str(tmp_path / "s"), columns=kinds)
    assert found.columns == wanted.columns
    left, right = _values(found), _values(wanted)
    for name, values in right.items():
        assert left[name].dtype == values.dtype, name
        assert np.array_equal(left[name], values), name


def test_a_column_of_the_folders_holds_out_whole_files(spark: Any, tmp_path: Path) -> None:
    frame = spark.range(0, 90, 1, 2).select("id", (F.col("id") % 3 == 0).cast("int").alias("held"))
    frame.write.partitionBy("held").parquet(str(tmp_path / "t"))
    manifest = table_manifest(spark, list_parquet(spark, str(tmp_path / "t")), validation_col="held")
    assert [column.name for column in manifest.columns] == ["id"]
    ids = _values(manifest.select("validation"))["id"]
    assert ids.tolist() == list(range(0, 90, 3))
    assert manifest.stats["validation"]["id"].maximum == 87
    assert manifest.select("train").num_rows == manifest.stats["train"]["id"].rows == 60


def test_a_vocabulary_counts_files_of_training_rows_alone(spark: Any, tmp_path: Path) -> None:
    frame = spark.range(30).selectExpr(
        "id", "if(id < 20, 'new', 'old') as city", "int(id < 20) as held", "if(id < 20, 'x', 'y') as region"
    )
    frame.write.partitionBy("held", "region").parquet(f"{tmp_path}/t")
    table, kinds = list_parquet(spark, f"{tmp_path}/t"), {"city": Vocabulary(), "region": Vocabulary()}
    manifest = table_manifest(spark, table, ["id", "city", "region"], kinds, "held")
    assert manifest.column("city").kind.words == ("old",)
    assert manifest.column("region").kind.words == ("y",)


def test_timestamps_in_a_delta_log_are_in_the_time_zone_of_the_session(spark: Any, tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake")
    times = pa.array([0, 1_000_000, 2_000_000], pa.timestamp("us", "UTC"))
    table = pa.table({"id": [0, 1, 2], "time": times})
    deltalake.write_deltalake(str(tmp_path), table, partition_by=["time"])
    zone = spark.conf.get("spark.sql.session.timeZone")
    try:
        spark.conf.set("spark.sql.session.timeZone", "America/New_York")
        found = table_manifest(spark, list_delta(spark, str(tmp_path))).range_of("time")
        assert found == (5 * 3_600_000_000, 5 * 3_600_000_000 + 2_000_000)
        spark.conf.set("spark.sql.session.timeZone", "UTC")
        assert table_manifest(spark, list_delta(spark, str(tmp_path))).range_of("time") == (0, 2_000_000)
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)


def test_a_delta_table_with_deleted_rows_is_refused(spark: Any, tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake")
    deltalake.write_deltalake(str(tmp_path), _rows(0, 3))
    listing = list_delta(spark, str(tmp_path))
    ((name, _, _),) = listing.files
    with pytest.raises(ValueError, match=r"has deleted rows or .* use fitOnDelta"):
        table_manifest(spark, replace(listing, deleted={name: np.array([1])}))


def test_many_footers_are_read_by_a_job(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        pq.write_table(_rows(10 * number, 10 - number), tmp_path / f"{number}.parquet")
    listing = list_parquet(spark, str(tmp_path))
    by_driver = table_manifest(spark, listing)
    monkeypatch.setattr(footers, "_ON_DRIVER", 4)
    assert table_manifest(spark, listing) == by_driver
    assert by_driver.row_groups == (10, 9, 8, 7, 6)


def test_names_of_folders_and_files_are_those_that_spark_reads(spark: Any, tmp_path: Path) -> None:
    for folder in ("c=Z%C3%BCrich", "c=a b%2Fc", "c=100%", "c=Gen\u00e8ve"):
        (tmp_path / "t" / folder).mkdir(parents=True)
        for name, word in (
            ("part[1].parquet", "in brackets"),
            ("part1.parquet", "plain"),
            ("{a,b}?.parquet", "a"),
            ("_of=1.parquet", "hidden from nobody"),
            (".of=1.parquet", "hidden"),
            ("_of.parquet", "hidden"),
        ):
            pq.write_table(pa.table({"word": [word]}), tmp_path / "t" / folder / name)
    pq.write_metadata(pa.schema([("word", pa.string())]), tmp_path / "t" / "_common_metadata")
    root = str(tmp_path / "t")
    listing = list_parquet(spark, root)
    assert [path.rpartition("/")[2] for path, _, _ in listing.files] == [
        "_of=1.parquet", "part1.parquet", "part[1].parquet", "{a,b}?.parquet"
    ] * 4  # fmt: skip
    names = [row.c for row in spark.read.parquet(root).collect()]
    assert sorted(listing.folder_columns["c"].to_pylist()) == sorted(names)
    manifest = table_manifest(spark, listing, kinds={"c": Vocabulary(), "word": Vocabulary()})
    kinds = {column.name: column.kind for column in manifest.columns}
    assert set(kinds["c"].words) == set(names)
    assert set(kinds["word"].words) == {"in brackets", "plain", "a", "hidden from nobody"}
    assert manifest.num_rows == len(names) == 16


def test_columns_that_spark_reads_as_other_types_than_arrow_are_refused(spark: Any, tmp_path: Path) -> None:
    times = pa.array(np.arange(3) * 1_000, pa.timestamp("ns"))
    pq.write_table(pa.table({"id": np.arange(3), "time": times}), tmp_path / "a.parquet")
    spark.conf.set("spark.sql.legacy.parquet.nanosAsLong", "true")
    try:
        listing = list_parquet(spark, str(tmp_path))
        with pytest.raises(ValueError, match=r"'time' as timestamp\[ns\], but Spark reads it as bigint"):
            table_manifest(spark, listing)
        assert table_manifest(spark, listing, ["id"]).num_rows == 3
    finally:
        spark.conf.unset("spark.sql.legacy.parquet.nanosAsLong")


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["INT96", "TIMESTAMP_MICROS"])
def test_old_days_of_the_julian_calendar_are_refused(spark: Any, tmp_path: Path, stored: str) -> None:
    root, settings = str(tmp_path), {"outputTimestampType": stored}
    settings |= {f"{name}RebaseModeInWrite": "LEGACY" for name in ("datetime", "int96")}
    days = spark.range(8).selectExpr(
        "date_add(date'1582-10-04', cast(id as int)) as day",
        "date_add(date'1582-10-15', cast(id as int)) as new",
        "timestamp'1899-12-31 23:59:59Z' + make_dt_interval(0, 0, 0, id) as time",
        "cast(date'1500-01-01' as timestamp_ntz) as clock",
    )
    for name, value in settings.items():
        spark.conf.set(f"spark.sql.parquet.{name}", value)
    try:
        days.coalesce(1).write.parquet(f"{root}/old")
    finally:
        for name in settings:
            spark.conf.unset(f"spark.sql.parquet.{name}")
    days.coalesce(1).write.parquet(f"{root}/new")
    for name, since in (("day", "dates before 1582-10-15"), ("time", "timestamps before 1900")):
        table_manifest(spark, list_parquet(spark, f"{root}/new"), [name])
        with pytest.raises(
            ValueError, match=rf"'{name}' holds {since}, .*/old/.* written in the Julian .*fit"
        ):
            table_manifest(spark, list_parquet(spark, f"{root}/old"), [name])
    # Dates that are equal in both calendars are read. A file without a calendar is read unless Spark
    # rebases.
    table_manifest(spark, list_parquet(spark, f"{root}/old"), ["new", "clock"])
    pq.write_table(pa.table({"day": pa.array([-200_000], pa.date32())}), f"{root}/other.parquet")
    assert table_manifest(spark, list_parquet(spark, f"{root}/other.parquet")).stats["train"]["day"].minimum
    spark.conf.set("spark.sql.parquet.datetimeRebaseModeInRead", "LEGACY")
    try:
        with pytest.raises(
            ValueError, match=r"Julian calendar .*\(spark.sql.parquet.datetimeRebaseModeInRead"
        ):
            table_manifest(spark, list_parquet(spark, f"{root}/other.parquet"))
    finally:
        spark.conf.unset("spark.sql.parquet.datetimeRebaseModeInRead")


def test_long_rows_make_small_windows(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = pa.array([[1.0] * 5_000] * 300)
    pq.write_table(
        pa.table({"id": np.arange(300), "long": lists}), tmp_path / "a.parquet", write_page_index=True
    )
    kinds = {"long": Ragged()}
    manifest = table_manifest(spark, list_parquet(spark, str(tmp_path)), kinds=kinds)
    assert max(manifest.row_groups) * 5_000 * 8 <= manifest_module.ROW_GROUP_BYTES
    # Unsplit row groups count with their size in memory, even if the file is small.
    pq.write_table(pa.table({"id": np.arange(300), "long": lists}), tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 100_000
    monkeypatch.setattr(manifest_module, "MAX_UNSPLIT_BYTES", 11 << 20)
    with pytest.raises(ValueError, match=r"row group of 300 rows .*readers would hold 11 MiB"):
        table_manifest(spark, list_parquet(spark, str(tmp_path)), kinds=kinds)
    # Windows are sized for the mean row length; a few much longer rows are read unsplit.
    few = pa.table({"id": np.arange(30), "long": lists.slice(0, 30).to_pylist()})
    for name, table in (("a", few), ("b", pa.table({"id": np.arange(9_000), "long": [[1.0]] * 9_000}))):
        pq.write_table(table, tmp_path / f"{name}.parquet", write_page_index=True)
    monkeypatch.setattr(manifest_module, "MAX_UNSPLIT_BYTES", 1 << 20)
    monkeypatch.setattr(manifest_module, "ROW_GROUP_BYTES", 1 << 20)
    with pytest.raises(ValueError, match=r"row group of 30 rows .*differ much in length"):
        table_manifest(spark, list_parquet(spark, str(tmp_path)), kinds=kinds)
    # Long texts are no such rows, because the reader holds only their hashes.
    texts = pa.table({"text": [f"{number:09d}" * 9_000 for number in range(30)]})
    (tmp_path / "texts").mkdir()
    pq.write_table(texts, tmp_path / "texts" / "a.parquet", write_page_index=True)
    found = table_manifest(
        spark, list_parquet(spark, str(tmp_path / "texts")), kinds={"text": HashBuckets(9)}
    )
    assert found.row_groups == (30,)


def test_a_manifest_is_saved_and_sees_every_change_of_a_file(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    plain = {"use_dictionary": False, "compression": "none", "write_statistics": False}
    for name in ("a", "b"):
        pq.write_table(_rows(0, 30), tmp_path / "t" / f"{name}.parquet", **plain)
    manifest = table_manifest(spark, list_parquet(spark, str(tmp_path / "t")))
    replace(manifest, uri=str(tmp_path / "m")).save()
    loaded = ShardManifest.load(tmp_path / "m")
    assert replace(loaded, uri=manifest.uri) == manifest
    loaded.verify_files()
    reader = open_reader(loaded, engine="arrow")
    assert sum(len(batch["id"]) for batch in reader.batches(0)) == 60
    # The file changes between two epochs but keeps its number of rows and bytes.
    size = (tmp_path / "t" / "b.parquet").stat().st_size
    pq.write_table(_rows(30, 30), tmp_path / "t" / "b.parquet", **plain)
    assert (tmp_path / "t" / "b.parquet").stat().st_size == size
    with pytest.raises(RuntimeError, match=r"b\.parquet' .*has changed since .*do not change a table"):
        list(reader.batches(1))
    with pytest.raises(ValueError, match=r"b\.parquet' has changed since"):
        loaded.verify_files()
    with pytest.raises(ValueError, match="engine 'petastorm' reads only shards of write_shards"):
        open_reader(loaded, engine="petastorm")


def test_tables_that_cannot_be_read_as_they_are_are_refused(spark: Any, tmp_path: Path) -> None:
    def refused(sentence: str, **settings: Any) -> None:
        with pytest.raises(ValueError, match=sentence):
            table_manifest(spark, list_parquet(spark, str(tmp_path)), **settings)

    refused("holds no Parquet files")
    pq.write_table(_rows(0, 9), tmp_path / "a.parquet")
    pq.write_table(
        _rows(0, 9).cast(pa.schema([("id", pa.int32()), ("half", pa.float64())])), tmp_path / "b.parquet"
    )
    refused(r"b\.parquet' holds column 'id' as int32, but .*a\.parquet' as int64")
    pq.write_table(_rows(0, 9).select(["id"]), tmp_path / "b.parquet")
    refused(r"b\.parquet' has no column 'half'")
    (tmp_path / "b.parquet").write_text("id,half")
    refused(r"b\.parquet' cannot be read as Parquet")
    pq.write_table(_rows(0, 0), tmp_path / "b.parquet")
    pq.write_table(_rows(0, 0), tmp_path / "a.parquet")
    refused("has no rows")
    pq.write_table(pa.table({"id": [1, None, 3], "text": ["a"] * 3}), tmp_path / "a.parquet")
    (tmp_path / "b.parquet").unlink()
    refused("'id' has nulls in 1 of 3 rows", columns=["id"])
    refused("'text' has type string")
    with pytest.raises(ValueError, match="there is no folder"):
        list_parquet(spark, str(tmp_path / "none"))
    (tmp_path / "d" / "k=__HIVE_DEFAULT_PARTITION__").mkdir(parents=True)
    (tmp_path / "d" / "k=1").mkdir()
    for name in ("k=1", "k=__HIVE_DEFAULT_PARTITION__"):
        pq.write_table(_rows(0, 5), tmp_path / "d" / name / "a.parquet")
    with pytest.raises(ValueError, match="'k' has nulls in 5 of 10 rows"):
        table_manifest(spark, list_parquet(spark, str(tmp_path / "d")))


def test_lists_without_a_page_index_are_read_whole_or_refused(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = pa.ListArray.from_arrays(
        pa.array(np.arange(0, 1_001, 2), pa.int32()), pa.array(np.arange(1_000.0))
    )
    pq.write_table(pa.table({"id": np.arange(500), "half": lists}), tmp_path / "a.parquet")
    monkeypatch.setattr(manifest_module, "WINDOW_ROWS", 100)
    manifest = table_manifest(spark, list_parquet(spark, str(tmp_path)), kinds={"half": Ragged()})
    assert manifest.row_groups == (500,)
    assert table_manifest(spark, list_parquet(spark, str(tmp_path)), ["id"]).row_groups == (100,) * 5
    monkeypatch.setattr(manifest_module, "MAX_UNSPLIT_BYTES", 1_000)
    with pytest.raises(ValueError, match=r"row group of 500 rows .*its arrays have no page index"):
        table_manifest(spark, list_parquet(spark, str(tmp_path)))
