"""External tables through the readers: every guarantee for shards also holds for tables in any layout."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions as F
from spark_tables import spark_conf

from ringspark.extras.external_tables import list_parquet, table_manifest
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

pytestmark = pytest.mark.spark


def _rows(first: int, rows: int) -> Any:
    ids = np.arange(first, first + rows)
    return pa.table({"id": ids, "half": ids / 2})


def _put(path: Path, table: Any, **settings: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(table) if isinstance(table, dict) else table, path, **settings)


def _manifest(spark: Any, root: Any, *columns: Any, **settings: Any) -> ShardManifest:
    return table_manifest(spark, list_parquet(spark, str(root)), *columns, **settings)


# Layout -> the files of a table: path, rows, settings of the writer.
LAYOUTS: dict[str, list[tuple[str, int, dict[str, Any]]]] = {
    "single rows": [
        ("a.parquet", 40, {"row_group_size": 1}),
        ("b.parquet", 17, {"row_group_size": 1, "compression": "zstd"}),
    ],
    "thousands": [(f"{rows}.parquet", rows, {"row_group_size": 1_000}) for rows in (2_500, 4_500)],
    "one large": [("a.parquet", 130_007, {"row_group_size": 1 << 20})],
    "folders": [
        (f"day=2024-01-0{day}/part={part}/a.parquet", 300, {"row_group_size": 70})
        for day, part in ((1, 7), (2, 8), (2, 9))
    ],
    "a litter": [],
}


def _lay_out(folder: Path, layout: str) -> int:
    """Writes files of consecutive ids; returns the number of rows."""
    first = 0
    for name, rows, settings in LAYOUTS[layout]:
        _put(folder / name, _rows(first, rows), **settings)
        first += rows
    return first or _a_litter(folder)


def _a_litter(folder: Path) -> int:
    """Writes files without rows or bytes, an empty row group, hidden and nested files, reordered columns."""
    _put(folder / "a.parquet", _rows(0, 500).select(["half", "id"]), compression="gzip")
    _put(folder / "b.parquet", _rows(0, 0))
    with pq.ParquetWriter(folder / "c.parquet", _rows(0, 0).schema, use_dictionary=False) as writer:
        for part in (_rows(500, 7), _rows(0, 0), _rows(507, 45_000)):
            writer.write_table(part, row_group_size=1 << 20)
    (folder / "empty.parquet").touch()
    for hidden in ("_SUCCESS", ".c.parquet.crc", "_temporary/0/d.parquet", ".hidden/e.parquet"):
        _put(folder / hidden, _rows(0, 500))
    return 45_507


def _steps(manifest: Any, shards: int, batch_size: int, start_step: int = 0, **settings: Any) -> list[Any]:
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_row_comes_once_in_one_step_for_any_workers(spark: Any, tmp_path: Path, layout: str) -> None:
    rows = _lay_out(tmp_path, layout)
    manifest = _manifest(spark, tmp_path, ["id", "half"])
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


def _assert_equal(found: ShardManifest, wanted: ShardManifest) -> None:
    assert found.columns == wanted.columns
    left, right = _values(found), _values(wanted)
    assert left.keys() == right.keys()
    for name, values in right.items():
        assert left[name].dtype == values.dtype, name
        assert np.array_equal(left[name], values), name


@pytest.mark.slow
def test_every_kind_has_the_numbers_of_shards(spark: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(manifest_module, "WINDOW_ROWS", 60)

    def vectors(n: int) -> Any:
        if n % 2:
            return n, Vectors.dense([n / 3] * 8), Vectors.sparse(8, [n % 8], [1.0 * n])
        return n, Vectors.sparse(8, [1, 5], [n * 1.1, -1e300]), Vectors.sparse(8, [0, 3], [2.0, n])

    more = spark.createDataFrame(map(vectors, range(700)), ["id", "vector", "sparse"])
    frame = _all_types(spark).join(more, "id").orderBy("id").coalesce(1)
    pages = {"parquet.page.size": 2_000, "parquet.page.row.count.limit": 50}
    root = str(tmp_path / "table")
    frame.write.options(**pages).partitionBy("folder", "named").parquet(root)
    read = spark.read.parquet(root)
    wanted = write_shards(read, str(tmp_path / "shards"), columns=KINDS)
    found = _manifest(spark, root, kinds=KINDS)
    assert max(found.row_groups) < 120 <= max(max(file.row_groups) for file in found.files)
    _assert_equal(found, wanted)
    for name, stats in wanted.stats["train"].items():
        same = found.stats["train"][name]
        for key in ("rows", "values", "minimum", "maximum", "fractional", "infs"):
            assert getattr(same, key) == getattr(stats, key), (name, key)
        assert same.mean == pytest.approx(stats.mean, rel=1e-12)
        assert same.std == pytest.approx(stats.std, rel=1e-9)


@pytest.mark.slow
def test_what_pandas_writes_is_read_as_spark_reads_it(spark: Any, tmp_path: Path) -> None:
    rows = 50
    numbers = np.arange(rows)
    table = {
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
    _put(tmp_path / "t" / "a.parquet", table, use_deprecated_int96_timestamps=True)
    kinds = {"category": Vocabulary(), "wide": HashBuckets(9)}
    found = _manifest(spark, tmp_path / "t", kinds=kinds)
    wanted = write_shards(spark.read.parquet(str(tmp_path / "t")), str(tmp_path / "s"), columns=kinds)
    _assert_equal(found, wanted)


def test_a_column_of_the_folders_holds_out_whole_files(spark: Any, tmp_path: Path) -> None:
    frame = spark.range(0, 90, 1, 2).select("id", (F.col("id") % 3 == 0).cast("int").alias("held"))
    frame.write.partitionBy("held").parquet(str(tmp_path / "t"))
    manifest = _manifest(spark, tmp_path / "t", validation_col="held")
    assert [column.name for column in manifest.columns] == ["id"]
    ids = _values(manifest.select("validation"))["id"]
    assert ids.tolist() == list(range(0, 90, 3))
    assert manifest.stats["validation"]["id"].maximum == 87
    assert manifest.select("train").num_rows == manifest.stats["train"]["id"].rows == 60


def test_a_folder_of_a_time_without_zone_has_its_number_in_any_time_zone(spark: Any, tmp_path: Path) -> None:
    conf = {"spark.sql.session.timeZone": "Europe/Zurich", "spark.sql.timestampType": "TIMESTAMP_NTZ"}
    with spark_conf(spark, conf):
        hours = spark.range(3).selectExpr(
            "id", "timestamp_ntz'2024-07-01 12:00:00' + make_dt_interval(0, int(id)) t"
        )
        hours.write.partitionBy("t").parquet(f"{tmp_path}/t")
        read = spark.read.parquet(f"{tmp_path}/t")
        assert read.schema["t"].dataType.simpleString() == "timestamp_ntz"
        _assert_equal(_manifest(spark, tmp_path / "t"), write_shards(read, f"{tmp_path}/s"))


def test_a_vocabulary_counts_files_of_training_rows_alone(spark: Any, tmp_path: Path) -> None:
    columns = "if(id < 20, 'new', 'old') as city", "int(id < 20) as held", "if(id < 20, 'x', 'y') as region"
    frame = spark.range(30).selectExpr("id", *columns)
    frame.write.partitionBy("held", "region").parquet(f"{tmp_path}/t")
    table, kinds = list_parquet(spark, f"{tmp_path}/t"), {"city": Vocabulary(), "region": Vocabulary()}
    manifest = table_manifest(spark, table, ["id", "city", "region"], kinds, "held")
    assert manifest.column("city").kind.words == ("old",)
    assert manifest.column("region").kind.words == ("y",)


def test_a_delta_table_with_deleted_rows_is_refused(spark: Any, tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake")
    deltalake.write_deltalake(str(tmp_path), _rows(0, 3))
    listing = list_delta(spark, str(tmp_path))
    ((name, _, _),) = listing.files
    with pytest.raises(ValueError, match=r"has deleted rows or .* use fitOnDelta"):
        table_manifest(spark, replace(listing, deleted={name: np.array([1])}))


def test_names_of_folders_and_files_are_those_that_spark_reads(spark: Any, tmp_path: Path) -> None:
    for folder in ("c=Z%C3%BCrich", "c=a b%2Fc", "c=100%", "c=Gen\u00e8ve"):
        for name, word in (
            ("part[1].parquet", "in brackets"),
            ("part1.parquet", "plain"),
            ("{a,b}?.parquet", "a"),
            ("_of=1.parquet", "hidden from nobody"),
            (".of=1.parquet", "hidden"),
            ("_of.parquet", "hidden"),
        ):
            _put(tmp_path / "t" / folder / name, {"word": [word]})
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
    with spark_conf(spark, {"spark.sql.legacy.parquet.nanosAsLong": "true"}):
        with pytest.raises(ValueError, match=r"'time' as timestamp\[ns\], but Spark reads it as bigint"):
            _manifest(spark, tmp_path)
        assert _manifest(spark, tmp_path, ["id"]).num_rows == 3


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
    with spark_conf(spark, {f"spark.sql.parquet.{name}": value for name, value in settings.items()}):
        days.coalesce(1).write.parquet(f"{root}/old")
    days.coalesce(1).write.parquet(f"{root}/new")
    for name, since in (("day", "dates before 1582-10-15"), ("time", "timestamps before 1900")):
        _manifest(spark, f"{root}/new", [name])
        with pytest.raises(ValueError, match=rf"'{name}' holds {since}, .*/old/.* in the Julian .*fit"):
            _manifest(spark, f"{root}/old", [name])
    # Dates that are equal in both calendars are read. A file without a calendar is read unless Spark
    # rebases.
    _manifest(spark, f"{root}/old", ["new", "clock"])
    pq.write_table(pa.table({"day": pa.array([-200_000], pa.date32())}), f"{root}/other.parquet")
    assert _manifest(spark, f"{root}/other.parquet").stats["train"]["day"].minimum
    legacy = "spark.sql.parquet.datetimeRebaseModeInRead"
    refused = pytest.raises(ValueError, match=rf"Julian calendar .*\({legacy}")
    with spark_conf(spark, {legacy: "LEGACY"}), refused:
        _manifest(spark, f"{root}/other.parquet")


def test_long_rows_make_small_windows(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = pa.array([[1.0] * 5_000] * 300)
    table = {"id": np.arange(300), "long": lists}
    _put(tmp_path / "a.parquet", table, write_page_index=True)
    kinds = {"long": Ragged()}
    manifest = _manifest(spark, tmp_path, kinds=kinds)
    assert max(manifest.row_groups) * 5_000 * 8 <= manifest_module.ROW_GROUP_BYTES
    # Unsplit row groups count with their size in memory, even if the file is small.
    _put(tmp_path / "a.parquet", table)
    assert (tmp_path / "a.parquet").stat().st_size < 100_000
    monkeypatch.setattr(manifest_module, "MAX_UNSPLIT_BYTES", 11 << 20)
    with pytest.raises(ValueError, match=r"row group of 300 rows .*readers would hold 11 MiB"):
        _manifest(spark, tmp_path, kinds=kinds)
    # Windows are sized for the mean row length; a few much longer rows are read unsplit.
    for name, rows, length in (("a", 30, 5_000), ("b", 9_000, 1)):
        table = {"id": np.arange(rows), "long": [[1.0] * length] * rows}
        _put(tmp_path / f"{name}.parquet", table, write_page_index=True)
    monkeypatch.setattr(manifest_module, "MAX_UNSPLIT_BYTES", 1 << 20)
    monkeypatch.setattr(manifest_module, "ROW_GROUP_BYTES", 1 << 20)
    with pytest.raises(ValueError, match=r"row group of 30 rows .*differ much in length"):
        _manifest(spark, tmp_path, kinds=kinds)
    # Long texts are no such rows, because the reader holds only their hashes.
    texts = {"text": [f"{number:09d}" * 9_000 for number in range(30)]}
    _put(tmp_path / "texts" / "a.parquet", texts, write_page_index=True)
    found = _manifest(spark, tmp_path / "texts", kinds={"text": HashBuckets(9)})
    assert found.row_groups == (30,)


def test_a_manifest_is_saved_and_sees_every_change_of_a_file(spark: Any, tmp_path: Path) -> None:
    plain = {"use_dictionary": False, "compression": "none", "write_statistics": False}
    for name in ("a", "b"):
        _put(tmp_path / "t" / f"{name}.parquet", _rows(0, 30), **plain)
    manifest = _manifest(spark, tmp_path / "t")
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
            _manifest(spark, tmp_path, **settings)

    _put(tmp_path / "a.parquet", _rows(0, 9))
    _put(tmp_path / "b.parquet", {"id": pa.array(range(9), pa.int32()), "half": np.arange(9.0)})
    refused(r"b\.parquet' holds column 'id' as int32, but .*a\.parquet' as int64")
    _put(tmp_path / "b.parquet", {"id": range(9)})
    refused(r"b\.parquet' has no column 'half'")
    (tmp_path / "b.parquet").write_text("id,half")
    refused(r"b\.parquet' cannot be read as Parquet")
    for name in ("a", "b"):
        _put(tmp_path / f"{name}.parquet", _rows(0, 0))
    refused("has no rows")
    _put(tmp_path / "a.parquet", {"id": [1, None, 3], "text": ["a"] * 3})
    (tmp_path / "b.parquet").unlink()
    refused("'id' has nulls in 1 of 3 rows", columns=["id"])
    refused("'text' has type string")
    for name in ("k=1", "k=__HIVE_DEFAULT_PARTITION__"):
        _put(tmp_path / "d" / name / "a.parquet", _rows(0, 5))
    with pytest.raises(ValueError, match="'k' has nulls in 5 of 10 rows"):
        _manifest(spark, tmp_path / "d")


def test_lists_without_a_page_index_are_not_split(spark: Any, tmp_path: Path, monkeypatch: Any) -> None:
    lists = pa.array(np.arange(1_000.0).reshape(500, 2).tolist())
    _put(tmp_path / "a.parquet", {"id": np.arange(500), "half": lists})
    monkeypatch.setattr(manifest_module, "WINDOW_ROWS", 100)
    manifest = _manifest(spark, tmp_path, kinds={"half": Ragged()})
    assert manifest.row_groups == (500,)
    assert _manifest(spark, tmp_path, ["id"]).row_groups == (100,) * 5
    monkeypatch.setattr(manifest_module, "MAX_UNSPLIT_BYTES", 1_000)
    with pytest.raises(ValueError, match=r"row group of 500 rows .*its arrays have no page index"):
        _manifest(spark, tmp_path)


def _replace(path: Path, first: float) -> None:
    """Replaces the file with two row groups of two rows each."""
    settings = {"row_group_size": 2, "use_dictionary": False, "compression": "none"}
    _put(path.with_name("_new"), {"x": first + np.arange(4.0)}, **settings)
    os.replace(path.with_name("_new"), path)


@pytest.mark.parametrize("num_files", [2, 70])
def test_a_file_replaced_within_an_epoch_is_an_error(spark: Any, tmp_path: Path, num_files: int) -> None:
    """With 70 files, the reader closes and reopens the file; with 2, it keeps the file open."""
    for number in range(num_files):
        _replace(tmp_path / f"{number:02}.parquet", 4.0 * number)
    manifest = _manifest(spark, tmp_path)
    assert manifest.row_groups == (2,) * (2 * num_files)
    reader = open_reader(manifest, engine="arrow")
    order = [*range(0, 2 * num_files, 2), *range(1, 2 * num_files, 2)]
    tables = reader._tables(order)  # without read-ahead threads, so the file changes at an exact point
    found = [next(tables).column("x").to_pylist() for _ in range(num_files)]
    _replace(tmp_path / "00.parquet", -100.0)
    with pytest.raises(RuntimeError, match=r"00\.parquet' has changed since .*do not change a table"):
        found.extend(table.column("x").to_pylist() for table in tables)
    assert min(min(rows) for rows in found) == 0
    assert len(found) < 2 * num_files
