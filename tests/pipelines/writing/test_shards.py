import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset as ds
import pytest
from changing_frames import ROWS, random_function
from pyspark.ml.functions import array_to_vector
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from ringspark.pipelines import Image, Ragged, ShardManifest, open_reader, write_shards
from ringspark.pipelines.manifest import SPLITS
from ringspark.pipelines.writing import shards

pytestmark = pytest.mark.spark


def _ids(manifest: ShardManifest, name: str = "id") -> dict[str, list[Any]]:
    return {split: sorted(_read(manifest.select(split))[name].tolist()) for split in SPLITS}


def _read(manifest: ShardManifest) -> dict[str, np.ndarray]:
    batches = list(open_reader(manifest, engine="arrow", shuffle=False).batches(0))
    return {column.name: np.concatenate([b[column.name] for b in batches]) for column in manifest.columns}


@pytest.fixture
def rows(spark: Any) -> Any:
    columns = "cast(id as int) as i", "id * 0.1D as d", "array(float(id)) as a", "id % 5 = 0 as held_out"
    return spark.range(200).selectExpr(*columns)


def test_the_split_of_a_plan_that_changes_on_every_run_is_disjoint(spark: Any, tmp_path: Path) -> None:
    df = random_function(spark).selectExpr("id", "x < 0.3 AS held_out")
    assert len({tuple(row["held_out"] for row in df.collect()) for _ in "12"}) == 2
    manifest = write_shards(df, str(tmp_path / "s"), validation_col="held_out", num_files=2)
    train, held_out = _ids(manifest).values()
    assert sorted(train + held_out) == list(range(ROWS))
    assert 50 < len(held_out) < 250
    assert manifest.stats["train"]["id"].rows == len(train)
    assert [column.name for column in manifest.columns] == ["id"]


@pytest.mark.parametrize("kind", ["boolean", "int", "double"])
def test_the_indicator_may_be_boolean_or_a_number(rows: Any, tmp_path: Path, kind: str) -> None:
    df = rows.selectExpr("i", f"cast(held_out as {kind}) as held_out")
    manifest = write_shards(df, str(tmp_path / "s"), validation_col="held_out")
    assert _ids(manifest, "i")["validation"] == list(range(0, 200, 5))


def test_overwriting_swaps_the_shards_and_removes_the_old_files(rows: Any, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    write_shards(rows.select("i"), str(folder))
    (folder / "mine.txt").write_text("not a shard")
    manifest = write_shards(rows.select("d").limit(7), str(folder), overwrite=True)
    # Only the manifest stores row counts, so they cannot outlive the data.
    assert ShardManifest.load(folder).num_rows == 7
    (data,) = {file.path.split("/")[0] for file in manifest.files}
    assert set(os.listdir(folder)) == {"manifest.json", "mine.txt", data}
    assert {f"{data}/{name}" for name in os.listdir(folder / data)} == {file.path for file in manifest.files}


def test_overwriting_removes_no_folder_that_no_write_made(rows: Any, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    old = write_shards(rows.select("i"), str(folder))
    (data,) = {file.path.split("/")[0] for file in old.files}
    (folder / data).rename(folder / "photos")
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace(data, "photos"))
    assert ShardManifest.load(folder).num_rows == 200
    write_shards(rows.select("i").limit(7), str(folder), overwrite=True)
    assert ShardManifest.load(folder).num_rows == 7
    assert len(os.listdir(folder / "photos")) == len(old.files)


def test_a_failed_overwrite_keeps_the_old_shards(rows: Any, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    old = write_shards(rows.select("i"), str(folder))
    with pytest.raises(ValueError, match="has nulls in 40 of 200 rows"):
        write_shards(rows.selectExpr("if(held_out, null, i) as i"), str(folder), overwrite=True)
    assert ShardManifest.load(folder) == old
    old.verify_files()
    assert len(os.listdir(folder)) == 2


def test_vectors_of_several_sizes_and_null_vectors_are_refused(spark: Any, tmp_path: Path) -> None:
    schema = StructType([StructField("v", VectorUDT())])
    for value, message in (
        (Vectors.dense([1.0]), "vectors of size 1 to 2; give every row a vector of the same size"),
        (None, "column 'v' has nulls in 1 of 2 rows"),
    ):
        df = spark.createDataFrame([(Vectors.dense([1.0, 2.0]),), (value,)], schema)
        with pytest.raises(ValueError, match=message):
            write_shards(df, str(tmp_path / "s"))


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("if(i = 3, null, held_out)", "has 1 nulls or NaNs in 200 rows; fill them with df.na.fill first"),
        ("i", "must be boolean or 0/1, got values from 0 to 199"),
        ("if(i = 3, double('NaN'), 0D)", "has 1 nulls or NaNs"),
        ("a", "must be boolean or 0/1, got type array<float>"),
    ],
)
def test_an_indicator_that_is_none_is_refused(rows, tmp_path, expression, message):
    with pytest.raises(ValueError, match=message):
        write_shards(
            rows.selectExpr("i", f"{expression} as held_out"), str(tmp_path / "s"), validation_col="held_out"
        )
    assert not (tmp_path / "s").exists()


def test_a_failing_task_leaves_nothing(rows: Any, tmp_path: Path) -> None:
    df = rows.selectExpr("if(i = 150, cast(raise_error('boom') as int), i) as i")
    with pytest.raises(Exception, match="boom"):
        write_shards(df, str(tmp_path / "s"), row_group_rows=2)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("num_files", [None, 3])
def test_files_are_even_however_skewed_the_input_is(spark, tmp_path, num_files):
    # One partition holds nearly everything, some hold one row, most hold none.
    df = spark.range(5_000).repartition(8, F.when(F.col("id") < 4_990, 0).otherwise(F.col("id")))
    manifest = write_shards(df, str(tmp_path / "s"), num_files=num_files, row_group_rows=100)
    sizes = [file.num_rows for file in manifest.files]
    assert max(sizes) <= 1.5 * sum(sizes) / len(sizes)
    assert num_files is None or len(sizes) == num_files
    assert np.array_equal(np.sort(_read(manifest)["id"]), np.arange(5_000))
    assert manifest.stats["train"]["id"].rows == 5_000
    manifest.verify()
    (data,) = {file.path.split("/")[0] for file in manifest.files}
    assert len(os.listdir(tmp_path / "s" / data)) == len(sizes)


def test_a_fraction_of_the_rows_is_for_validation_by_their_hash(spark: Any, tmp_path: Path) -> None:
    def validation(name: str, rows: int, seed: int, partitions: int) -> set[int]:
        df = spark.range(rows).withColumn("a", F.array(F.col("id").cast("double"))).repartition(partitions)
        df = df.withColumn("v", array_to_vector("a"))
        manifest = write_shards(df, str(tmp_path / name), validation_fraction=0.2, seed=seed)
        found = _ids(manifest)
        assert sorted(found["train"] + found["validation"]) == list(range(rows))
        return set(found["validation"])

    few = validation("few", 2_000, 1, 2)
    # Five standard deviations.
    assert abs(len(few) - 400) < 5 * (2_000 * 0.2 * 0.8) ** 0.5
    # A row keeps its split when the data grows or is repartitioned; another seed gives another split.
    assert {row for row in validation("more", 3_000, 1, 5) if row < 2_000} == few
    assert validation("other", 2_000, 2, 2) != few


def test_equal_vectors_stay_in_one_split_dense_or_sparse(spark: Any, tmp_path: Path) -> None:
    rows = [(Vectors.dense([float(i % 50), 0.0]),) for i in range(100)]
    rows += [(Vectors.sparse(2, {0: float(i)} if i else {}),) for i in range(50)]
    manifest = write_shards(spark.createDataFrame(rows, ["v"]), str(tmp_path / "s"), validation_fraction=0.4)
    train, held_out = (set(map(tuple, values)) for values in _ids(manifest, "v").values())
    assert len(train) + len(held_out) == 50
    assert not train & held_out


def test_the_order_of_columns_does_not_move_rows_to_the_other_split(spark: Any, tmp_path: Path) -> None:
    df = spark.range(300).selectExpr("id", "id * 2 as a")
    one = write_shards(df, str(tmp_path / "one"), validation_fraction=0.3)
    two = write_shards(df.select("a", "id"), str(tmp_path / "two"), validation_fraction=0.3)
    assert _ids(one) == _ids(two)


def test_splitting_a_split_with_the_same_seed_is_warned_about(spark, tmp_path, caplog):
    first = write_shards(spark.range(300), str(tmp_path / "a"), validation_fraction=0.3)
    train = spark.read.parquet(*first.select("train").paths)
    second = write_shards(train, str(tmp_path / "b"), validation_fraction=0.3)
    assert second.select("validation").num_rows == 0
    assert "another seed" in caplog.text


@pytest.mark.parametrize(
    ("value", "warning"),
    [(1e300, "1 infinite values as float32"), (16_777_217.0, "pass columns={'v': Vector('float64')}")],
)
def test_values_that_float32_vectors_cannot_hold_are_warned_about(spark, tmp_path, caplog, value, warning):
    write_shards(spark.createDataFrame([(Vectors.dense([value, 1.0]),)], ["v"]), str(tmp_path / "s"))
    assert warning in caplog.text


def test_a_deviation_that_overflows_is_unknown_in_the_manifest(spark: Any, tmp_path: Path) -> None:
    manifest = write_shards(spark.range(3).coalesce(1).selectExpr("1.7e308D as x"), str(tmp_path / "s"))
    stats = ShardManifest.load(manifest.uri).stats["train"]["x"]
    assert (stats.mean, stats.std, stats.maximum) == (pytest.approx(1.7e308), None, 1.7e308)

    def refuse(text: str) -> None:
        raise AssertionError(text)

    json.loads((tmp_path / "s" / "manifest.json").read_text(), parse_constant=refuse)


def test_nulls_are_skipped_or_kept_where_asked_for(spark: Any, tmp_path: Path) -> None:
    df = spark.range(100).selectExpr(
        "id",
        "if(id % 4 = 0, null, id) as x",
        "if(id % 10 = 0, null, array(id)) as a",
        "id % 2 = 0 as held_out",
    )
    skipped = write_shards(df, str(tmp_path / "skip"), handle_invalid="skip", validation_col="held_out")
    kept = [row for row in range(100) if row % 4 and row % 10]
    assert skipped.skipped_rows == 100 - len(kept)
    assert ShardManifest.load(skipped.uri).skipped_rows == skipped.skipped_rows
    assert "rows skipped" in skipped.describe()
    assert sorted(_read(skipped)["id"].tolist()) == kept

    manifest = write_shards(df, str(tmp_path / "keep"), handle_invalid={"x": "keep", "a": "keep"})
    names = ["id", "x", "x.isnull", "a", "a.isnull", "held_out"]
    assert [column.name for column in manifest.columns] == names
    stats = manifest.stats["train"]["x"]
    # The fill value of a null does not count as a value.
    assert (stats.rows, stats.nulls, stats.values, stats.minimum) == (100, 25, 75, 1)
    assert stats.mean == pytest.approx(50)

    with pytest.raises(ValueError, match=r"of 100 rows, 50 are for validation, 50 are skipped"):
        write_shards(
            df.selectExpr("if(held_out, id, null) as id", "held_out"),
            str(tmp_path / "none"),
            handle_invalid="skip",
            validation_col="held_out",
        )


def test_one_writer_of_two_without_overwrite_gets_through(spark: Any, tmp_path: Path) -> None:
    def write(number: int) -> str:
        try:
            df = spark.range(number * 1000, number * 1000 + 500)
            return str(write_shards(df, str(tmp_path / "s")).stats["train"]["id"].minimum)
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(write, range(3)))
    (first,) = [int(result) for result in results if result.isdigit()]
    refusals = ("another writer has written shards", "holds shards already")
    assert sum(any(text in result for text in refusals) for result in results) == 2
    manifest = ShardManifest.load(tmp_path / "s")
    manifest.verify()
    assert sorted(_read(manifest)["id"].tolist()) == list(range(first, first + 500))
    assert len(os.listdir(tmp_path / "s")) == 2


def test_what_a_dead_writer_left_is_removed_a_day_later(spark: Any, tmp_path: Path) -> None:
    for name, hours in (("old", 25), ("young", 1)):
        folder = tmp_path / "s" / f"_shards-{name}"
        folder.mkdir(parents=True)
        (folder / "part.parquet").write_text("half a file")
        when = time.time() - hours * 3600
        os.utime(folder / "part.parquet", (when, when))
    write_shards(spark.range(5), str(tmp_path / "s"))
    assert not (tmp_path / "s" / "_shards-old").exists()
    assert (tmp_path / "s" / "_shards-young").exists()


def test_other_tools_see_no_data_in_the_folder_but_read_the_files_that_the_manifest_names(spark, tmp_path):
    manifest = write_shards(spark.range(50), str(tmp_path / "s"))
    assert spark.read.parquet(*manifest.paths).count() == 50
    assert ds.dataset(str(tmp_path / "s"), format="parquet", exclude_invalid_files=True).count_rows() == 0


def test_columns_whose_arrays_would_share_a_name_are_refused(spark: Any, tmp_path: Path) -> None:
    df = spark.range(3).selectExpr("array(id) as x", "id as `x.offsets`")
    with pytest.raises(ValueError, match=r"two columns are named 'x.offsets'"):
        write_shards(df, str(tmp_path / "s"), columns={"x": Ragged()})
    masked = spark.range(3).selectExpr("id", "id = 1 as `id.isnull`")
    for handling in ("error", "keep"):
        with pytest.raises(ValueError, match=r"'id.isnull' has the name of the null mask .* 'id'; rename"):
            write_shards(masked, str(tmp_path / "s"), handle_invalid=handling)
    # Spark could not distinguish these columns either.
    with pytest.raises(ValueError, match="two columns are named 'id'"):
        write_shards(spark.range(3).selectExpr("id", "id as ID"), str(tmp_path / "s"))


@pytest.mark.parametrize("compression", ["zstd", "snappy", "lz4", "gzip", "none"])
def test_every_codec_reads_back(rows: Any, tmp_path: Path, compression: str) -> None:
    manifest = write_shards(rows.select("i"), str(tmp_path / "s"), compression=compression)
    assert sorted(_read(manifest)["i"].tolist()) == list(range(200))


@pytest.mark.parametrize(
    "layout", ["shuffled", pytest.param("cached", marks=pytest.mark.slow), "few rows together"]
)
def test_few_tasks_write_tiny_partitions_into_splits_of_one_task_each(spark, tmp_path, monkeypatch, layout):
    frame = spark.range(150, numPartitions=24).selectExpr("id", "if(id % 50 = 7, null, id * 2) AS x")
    if layout == "few rows together":
        frame = frame.where("id BETWEEN 20 AND 40")
    elif layout == "cached":
        # The blocks of a cache have a place, by which Spark orders the partitions of a task.
        frame = frame.repartition(24, "id").cache()

    def write(name: str) -> ShardManifest:
        spark.sparkContext.setJobGroup(f"{layout} {name}", "write")
        return write_shards(
            frame, str(tmp_path / name), validation_fraction=0.3, seed=4, handle_invalid={"x": "skip"}
        )

    monkeypatch.setattr(shards, "_MIN_TASKS", 16)
    merged = write("merged")
    monkeypatch.setattr(shards, "_SMALL_TABLE_BYTES", -1)
    separate = write("separate")
    assert _ids(merged) == _ids(separate)
    assert merged.skipped_rows == separate.skipped_rows
    tracker = spark.sparkContext.statusTracker()
    tasks = {
        name: max(
            tracker.getStageInfo(stage).numTasks
            for job in tracker.getJobIdsForGroup(f"{layout} {name}")
            for stage in tracker.getJobInfo(job).stageIds
        )
        for name in ("merged", "separate")
    }
    assert tasks["separate"] == 24
    assert layout != "shuffled" or tasks["merged"] == 16


def test_an_unreadable_row_is_named_by_its_place_in_the_task(spark: Any, tmp_path: Path) -> None:
    frame = spark.range(0, 400, 1, 50).selectExpr("id", "if(id = 301, X'00', X'') AS picture")
    frame = frame.where("id > 300")
    with pytest.raises(ValueError, match=r"in row 0 \(counted from 0\) of write task 37; repair"):
        write_shards(frame, str(tmp_path / "s"), columns={"picture": Image(2, 2)})
