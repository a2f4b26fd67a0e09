from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringspark.pipelines import ShardManifest, open_reader, write_shards

pytestmark = pytest.mark.spark


def _read(manifest: ShardManifest) -> dict[str, np.ndarray[Any, Any]]:
    batches = list(open_reader(manifest, engine="arrow", shuffle=False).batches(0))
    return {column.name: np.concatenate([b[column.name] for b in batches]) for column in manifest.columns}


@pytest.fixture
def rows(spark: Any) -> Any:
    """200 rows of every kind of column."""
    return spark.range(200).selectExpr(
        "id + 16777217 - 100 as id",
        "cast(id as int) as i",
        "cast(id % 100 as tinyint) as b",
        "id % 2 = 0 as flag",
        "cast(id as float) as f",
        "id * 0.1D as d",
        "array(cast(id as float), cast(-id as float)) as a",
        "array(id, id + 1, id + 2) as tokens",
        "id % 5 = 0 as held_out",
        "id as `dotted.name`",
    )


def test_every_row_arrives_exactly(rows: Any, tmp_path: Path) -> None:
    manifest = write_shards(rows.drop("held_out"), str(tmp_path / "s"), num_files=3, row_group_rows=32)
    manifest.verify_files()
    assert ShardManifest.load(tmp_path / "s") == manifest
    assert len(manifest.files) == 3
    assert max(f.num_rows for f in manifest.files) - min(f.num_rows for f in manifest.files) <= 4
    data = _read(manifest)
    order = np.argsort(data["i"])
    ids = np.arange(200)
    assert {name: values.dtype.name for name, values in data.items()} == {
        "id": "int64", "i": "int32", "b": "int8", "flag": "bool", "f": "float32", "d": "float64",
        "a": "float32", "tokens": "int64", "dotted.name": "int64",
    }  # fmt: skip
    # Beyond 2**24 float32 has no odd numbers: a cast anywhere would show.
    assert np.array_equal(data["id"][order], ids + 16_777_217 - 100)
    assert np.array_equal(data["flag"][order], ids % 2 == 0)
    assert np.array_equal(data["a"][order], np.stack([ids, -ids], axis=1).astype(np.float32))
    assert np.array_equal(data["tokens"][order], ids[:, None] + [0, 1, 2])
    assert np.array_equal(data["dotted.name"][order], ids)
    assert manifest.stats["train"]["id"].maximum == 16_777_217 + 99


def test_vectors_dense_and_sparse_become_float32_arrays(spark: Any, tmp_path: Path) -> None:
    from pyspark.ml.linalg import Vectors

    data = [(i, Vectors.dense([i, 1.5]) if i % 2 else Vectors.sparse(2, [0], [float(i)])) for i in range(20)]
    manifest = write_shards(spark.createDataFrame(data, ["i", "v"]), str(tmp_path / "s"))
    read = _read(manifest)
    expected = [[i, 1.5 if i % 2 else 0.0] for i in range(20)]
    assert read["v"].dtype == np.float32
    assert np.array_equal(read["v"][np.argsort(read["i"])], np.array(expected, dtype=np.float32))


def test_the_split_of_a_plan_that_changes_on_every_run_is_disjoint(spark: Any, tmp_path: Path) -> None:
    from pyspark.sql import functions as F

    # rand() without a seed is drawn anew for every action; a UDF-like source of indeterminism.
    df = spark.range(500).withColumn("held_out", F.expr("uuid() < '4'"))
    manifest = write_shards(df, str(tmp_path / "s"), validation_col="held_out", num_files=2)
    train, held_out = _read(manifest.select("train"))["id"], _read(manifest.select("validation"))["id"]
    assert np.array_equal(np.sort(np.concatenate([train, held_out])), np.arange(500))
    assert 50 < len(held_out) < 250
    assert manifest.stats["train"]["id"].rows == len(train)
    assert [column.name for column in manifest.columns] == ["id"]


@pytest.mark.parametrize("kind", ["boolean", "int", "double"])
def test_the_indicator_may_be_boolean_or_a_number(rows: Any, tmp_path: Path, kind: str) -> None:
    df = rows.selectExpr("i", f"cast(held_out as {kind}) as held_out")
    manifest = write_shards(df, str(tmp_path / "s"), validation_col="held_out")
    assert sorted(_read(manifest.select("validation"))["i"].tolist()) == list(range(0, 200, 5))


def test_overwriting_swaps_the_shards_and_removes_the_old_files(rows: Any, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    write_shards(rows.select("i"), str(folder))
    (folder / "mine.txt").write_text("not a shard")
    with pytest.raises(
        ValueError, match=r"holds shards already; choose another folder or pass overwrite=True"
    ):
        write_shards(rows.select("i"), str(folder))
    manifest = write_shards(rows.select("d").limit(7), str(folder), overwrite=True)
    # Row counts live in the manifest alone, so none can outlive the data.
    assert ShardManifest.load(folder).num_rows == 7
    expected = {"manifest.json", "mine.txt", *(file.path for file in manifest.files)}
    assert set(os.listdir(folder)) == expected


def test_a_failed_overwrite_keeps_the_old_shards(rows: Any, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    old = write_shards(rows.select("i"), str(folder))
    with pytest.raises(ValueError, match="has 40 nulls"):
        write_shards(rows.selectExpr("if(held_out, null, i) as i"), str(folder), overwrite=True)
    assert ShardManifest.load(folder) == old
    old.verify_files()
    assert len(os.listdir(folder)) == len(old.files) + 1


@pytest.mark.parametrize(
    ("expressions", "message"),
    [
        (["i", "cast(i as string) as s"], "column 's' has type string, .*; index it with StringIndexer"),
        (["if(i % 50 = 1, null, i) as i"], "column 'i' has 4 nulls in 200 rows; fill or drop them first"),
        (["if(i = 1, null, a) as a"], "column 'a' has 1 nulls in 200 rows"),
        (["if(i = 1, array(1.0D, null), array(1.0D, 2.0D)) as a"], "column 'a' has 1 nulls"),
        (["if(i = 1, array(1.0D), array(1.0D, 2.0D)) as a"], "column 'a' has arrays of 1 to 2 elements"),
        (["cast(array() as array<int>) as a"], "column 'a' holds only empty arrays"),
    ],
)  # fmt: skip
def test_data_that_cannot_be_trained_on_is_refused_and_removed(
    rows: Any, tmp_path: Path, expressions: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        write_shards(rows.selectExpr(*expressions), str(tmp_path / "s"))
    assert not (tmp_path / "s").exists()


def test_vectors_of_several_sizes_and_null_vectors_are_refused(spark: Any, tmp_path: Path) -> None:
    from pyspark.ml.linalg import Vectors, VectorUDT
    from pyspark.sql.types import StructField, StructType

    schema = StructType([StructField("v", VectorUDT())])
    for value, message in (
        (Vectors.dense([1.0]), "arrays of 1 to 2 elements"),
        (None, "column 'v' has 1 nulls"),
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
        ("a", "must be boolean or 0/1, got an array column"),
        ("true", r"no training rows \(every row has 'held_out' true\)"),
    ],
)
def test_an_indicator_that_is_none_is_refused(
    rows: Any, tmp_path: Path, expression: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        write_shards(
            rows.selectExpr("i", f"{expression} as held_out"), str(tmp_path / "s"), validation_col="held_out"
        )
    assert not (tmp_path / "s").exists()


def test_no_rows_are_refused(rows: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the DataFrame has no training rows; nothing was written"):
        write_shards(rows.where("i < 0"), str(tmp_path / "s"))
    assert not (tmp_path / "s").exists()


def test_nan_and_infinity_are_recorded_not_refused(rows: Any, tmp_path: Path) -> None:
    df = rows.selectExpr(
        "case when i < 3 then double('NaN') when i < 5 then double('-Infinity') else d end as d"
    )
    stats = write_shards(df, str(tmp_path / "s")).stats["train"]["d"]
    assert (stats.nans, stats.infs, stats.minimum) == (3, 2, 0.5)


def test_a_failing_task_leaves_nothing(rows: Any, tmp_path: Path) -> None:
    df = rows.selectExpr("if(i = 150, cast(raise_error('boom') as int), i) as i")
    with pytest.raises(Exception, match="boom"):
        write_shards(df, str(tmp_path / "s"), row_group_rows=2)
    assert not (tmp_path / "s").exists()


def test_more_files_than_rows_are_fewer_files(rows: Any, tmp_path: Path) -> None:
    manifest = write_shards(rows.select("i").limit(2), str(tmp_path / "s"), num_files=5)
    assert manifest.num_rows == 2
    assert 1 <= len(manifest.files) <= 2


def test_settings_out_of_range_are_refused_before_spark_runs(rows: Any, tmp_path: Path) -> None:
    uri = str(tmp_path / "s")
    for settings, message in (
        ({"num_files": 0}, "num_files must be at least 1, got 0"),
        ({"row_group_rows": 0}, "row_group_rows must be at least 1, got 0"),
        ({"compression": "rar"}, "compression must be one of zstd, .*, got 'rar'"),
        ({"validation_col": "nope"}, "validation_col 'nope' is not a column; known: id, i"),
    ):
        with pytest.raises(ValueError, match=message):
            write_shards(rows, uri, **settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="there is no column to write"):
        write_shards(rows.select("held_out"), uri, validation_col="held_out")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        write_shards(rows.select("i"), str(tmp_path / "file" / "s"))
    with pytest.raises(ValueError, match="takes a batch DataFrame, got a streaming one"):
        write_shards(rows.sparkSession.readStream.format("rate").load(), uri)


@pytest.mark.parametrize("compression", ["zstd", "snappy", "lz4", "gzip", "none"])
def test_every_codec_reads_back(rows: Any, tmp_path: Path, compression: str) -> None:
    manifest = write_shards(rows.select("i"), str(tmp_path / "s"), compression=compression)
    assert sorted(_read(manifest)["i"].tolist()) == list(range(200))


def test_importing_the_package_needs_neither_spark_nor_petastorm() -> None:
    import subprocess
    import sys

    code = (
        "import sys, ringspark.pipelines; "
        "print([m for m in ('pyspark', 'petastorm', 'torch', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
