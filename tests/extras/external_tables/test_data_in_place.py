"""`data="inPlace"`: shards of references give the batches and weights of shards with copies of the rows."""

import io
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.ml import Pipeline
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions as F
from spark_tables import spark_conf

from ringspark.estimators import TorchRegressor
from ringspark.estimators.stages import fit_data
from ringspark.estimators.stages.fit_data import FitData
from ringspark.extras.external_tables.in_place.file_scan import find_scan
from ringspark.models import ModelSpec
from ringspark.pipelines import Binary, HashBuckets, Image, Ragged, ShardManifest, Vocabulary, open_reader
from ringspark.pipelines.columns import quote
from ringspark.pipelines.kinds import Kind
from ringspark.pipelines.writing import rebalance

pytestmark = pytest.mark.spark

ROWS = 9_000


@pytest.fixture(scope="module")
def table(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns a folder with a file per region. The arrays are so long that one file fills several groups."""
    root, number = str(tmp_path_factory.mktemp("in_place") / "table"), F.col("id")
    spark.range(0, ROWS, 1, 1).select(
        number,
        F.transform(F.sequence(F.lit(0), F.lit(127)), lambda i: F.sin(number * 128 + i)).alias("wave"),
        F.when(number % 11 > 0, number / 7).alias("holes"),
        F.array(F.when(number % 13 > 0, number).cast("double"), F.lit(1.0)).alias("pair"),
        F.slice(F.array(*map(F.lit, range(1, 6))), 1, (number % 5 + 1).cast("int")).alias("ragged"),
        F.concat(F.lit("é "), number % 5).alias("word"),
        F.struct(
            (number / 3).cast("float").alias("a, b"), number.cast("short").alias("c"), (number > 9).alias("d")
        ).alias("plain"),
        F.struct(
            F.struct(F.date_from_unix_date(number.cast("int")).alias("day")).alias("inner"),
            F.timestamp_micros(number * 1_000_003).alias("time"),
            (number / 3).cast("decimal(9,3)").alias("price"),
        ).alias("nested"),
        (number / 7).cast("decimal(15,7)").alias("decimal"),
        F.date_from_unix_date(number.cast("int")).alias("day"),
        F.timestamp_micros(number * 1_000_003).alias("time"),
        number.cast("int").alias("narrow"),
        (number % 4 == 0).cast("int").alias("held out"),
        F.when(number % 3 > 0, "r 1").otherwise("r 2").alias("region"),
    ).write.partitionBy("region").option("parquet.block.size", 1 << 20).parquet(root)
    return root


def _manifests(frame: Any, folder: Path, kinds: dict[str, Kind], **settings: Any) -> list[ShardManifest]:
    names = [name for name in frame.columns if name != settings.get("validation_col")]
    texts = fit_data.json.dumps({name: kind.to_json() for name, kind in kinds.items()})
    data = FitData(columns=tuple(names), kinds=texts, root=str(folder), **settings)
    return [replace(data, place=place).write(frame, str(folder / place)) for place in ("copy", "inPlace")]


def _same(left: Any, right: Any) -> bool:
    return left.keys() == right.keys() and all(
        values.dtype == right[name].dtype and np.array_equal(values, right[name], equal_nan=True)
        for name, values in left.items()
    )


def _check_batches(copy: ShardManifest, in_place: ShardManifest, engine: str = "arrow") -> None:
    assert in_place.file_columns
    assert copy.columns == in_place.columns
    assert copy.stats == in_place.stats
    assert copy.skipped_rows == in_place.skipped_rows
    for split in ("train", "validation"):
        ours, theirs = in_place.select(split), copy.select(split)  # type: ignore[arg-type]
        assert ours.row_groups == theirs.row_groups
        for shard, num_shards in ((0, 1), (1, 2)):
            batches = [
                open_reader(m, None, shard, num_shards, 100, 3, engine=engine).batches(1)
                for m in (ours, theirs)
            ]
            assert all(_same(a, b) for a, b in zip(*batches, strict=True))


KINDS: dict[str, Kind] = {"word": Vocabulary(), "ragged": Ragged(), "region": HashBuckets(7)}

Change = Callable[[Any], Any]
CASES: dict[str, tuple[Change, dict[str, Any]]] = {
    "all columns": (lambda df: df.drop("holes", "pair"), {}),
    "nulls and a fraction": (lambda df: df, {"drops_invalid": True, "validation_fraction": 0.3, "seed": 5}),
    "an indicator in the files": (lambda df: df.drop("holes", "pair"), {"validation_col": "held out"}),
    "renamed, cast, filtered": (
        lambda df: df.select(
            F.col("wave").alias("a b, c"),
            F.col("narrow").cast("double").alias("wave"),
            F.col("day").alias("narrow"),
            F.col("id").cast("float").alias("f"),
            (F.col("id") * 2 > 5_000).alias("computed"),
        ).where((F.col("wave") % 10 < 9) & F.col("computed")),
        {},
    ),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if "," not in case else []) for case in CASES]
)
def test_batches_are_those_of_a_copy(spark: Any, table: str, tmp_path: Path, case: str) -> None:
    change, settings = CASES[case]
    frame = change(spark.read.parquet(table)).coalesce(1)
    kinds = {name: kind for name, kind in KINDS.items() if name in frame.columns}
    copy, in_place = _manifests(frame, tmp_path, kinds, **settings)
    assert max(len(file.row_groups) for file in copy.files) > 1
    _check_batches(copy, in_place, "petastorm" if case == "nulls and a fraction" else "arrow")
    numbers = sum(file.num_bytes for file in in_place.files)
    assert numbers < sum(file.num_bytes for file in copy.files) / 20


@pytest.mark.parametrize("counts_references", [False, True])
def test_many_small_partitions_are_merged_as_in_a_copy(
    spark: Any, table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts_references: bool
) -> None:
    size = 1 << 19
    if counts_references:
        # Files of references are smaller than this, and files with the rows larger.
        monkeypatch.setattr(rebalance, "SMALL_FILE_BYTES", 10_000)
        monkeypatch.setattr(rebalance, "FILES_PER_CORE", 1)
        size = sum(path.stat().st_size for path in Path(table).rglob("*.parquet")) // 80
    frame = spark.read.parquet(table).select("id", "wave")
    with spark_conf(spark, {"spark.sql.files.maxPartitionBytes": size}):
        copy, in_place = _manifests(frame, tmp_path, {})
    _check_batches(copy, in_place)


@pytest.mark.slow
def test_images_vectors_and_bytes_are_those_of_a_copy(spark: Any, tmp_path: Path) -> None:
    from PIL import Image as Pillow

    def png(number: int) -> bytes:
        buffer = io.BytesIO()
        Pillow.fromarray(np.full((4, 6, 3), number, np.uint8)).save(buffer, "PNG")
        return buffer.getvalue()

    def raw(number: int) -> Any:
        return ("file:x", 2, 2, 3, 16, bytes([number] * 12))

    def row(n: int) -> Any:
        vectors = Vectors.dense([n, 0.5]), Vectors.sparse(4, [n % 4], [n])
        return n, png(n), png(n) if n % 5 else b"broken", raw(n), *vectors

    schema = "struct<origin:string,height:int,width:int,nChannels:int,mode:int,data:binary>"
    frame = spark.createDataFrame(map(row, range(60)), ["id", "png", "some", "raw", "dense", "sparse"])
    frame = frame.withColumn("raw", F.col("raw").cast(schema))
    frame.coalesce(1).write.parquet(f"{tmp_path}/t")
    kinds = {"png": Binary("image", (4, 6, 3)), "some": Image(3, 3), "raw": Image(2, 2)}
    copy, in_place = _manifests(spark.read.parquet(f"{tmp_path}/t"), tmp_path, kinds, drops_invalid=True)
    assert in_place.skipped_rows == 12
    assert in_place.file_columns is not None
    assert in_place.file_columns.keys() == set(frame.columns)
    _check_batches(copy, in_place)


def _linear(tmp_path: Path, **params: Any) -> TorchRegressor:
    settings: dict[str, Any] = {"model": ModelSpec("linear", {"in_features": 128, "out_features": 1})}
    settings |= {"featuresCol": "wave", "labelCol": "narrow", "epochs": 2, "batchSize": 600}
    settings |= {"learningRate": 0.01, "storageUri": str(tmp_path), "showProgress": False}
    return TorchRegressor(**(settings | params))


def _weights(model: Any) -> list[Any]:
    return [values.tolist() for values in model.module().state_dict().values()]


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Collects whether each write of shards wrote references."""
    found: list[bool] = []
    write = fit_data.write_shards

    def record(*args: Any, **settings: Any) -> ShardManifest:
        found.append(settings["references"] is not None)
        return write(*args, **settings)

    monkeypatch.setattr(fit_data, "write_shards", record)
    return found


def test_a_pipeline_trains_the_same_weights(spark: Any, table: str, tmp_path: Path, places: Any) -> None:
    frame = spark.read.parquet(table)
    settings = {"weightCol": "id", "validationFraction": 0.2, "keep": "best"}
    stages = (_linear(tmp_path, data=place, **settings) for place in ("copy", "inPlace"))
    models = [Pipeline(stages=[stage]).fit(frame).stages[0] for stage in stages]
    assert places == [False, True]
    assert _weights(models[0]) == _weights(models[1])
    histories = [model.summary.history for model in models]
    assert histories[0].validation_loss.tolist() == histories[1].validation_loss.tolist()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda df: df.withColumn("wave", F.reverse("wave")),
            "files have no column 'wave', which Spark comp",
        ),
        (lambda df: df.join(df.select("id"), "id"), "DataFrame's plan has 'Join'|not report from which file"),
        (lambda df: df.union(df), "does not report from which file each row comes"),
        (lambda df: df.orderBy("id"), "the DataFrame's plan has 'Sort'"),
        (lambda df: df.select("*", "_metadata"), "its column '_metadata' hides Spark's"),
        (lambda df: df.sparkSession.range(9).selectExpr("id", "array(1.0D) wave"), "not a scan of files"),
    ],
)
def test_rows_that_are_not_those_of_files_are_refused(
    spark: Any, table: str, tmp_path: Path, change: Change, reason: str
) -> None:
    frame = change(spark.read.parquet(table).select("id", "wave"))
    with pytest.raises(ValueError, match=rf"data='inPlace' cannot .*({reason}).*; set data='copy'"):
        FitData(columns=("id", "wave"), root="", place="inPlace").write(frame, str(tmp_path / "s"))
    assert not (tmp_path / "s").exists()


def test_a_cache_whose_rows_a_function_chose_is_refused(spark: Any, table: str, tmp_path: Path) -> None:
    frame = spark.read.parquet(table).select("id", "wave")
    data = FitData(columns=("id", "wave"), root="", place="inPlace")
    keeps_all = F.udf(lambda value: True, "boolean")
    with ExitStack() as stack:
        for count, chosen in enumerate([frame.where(keeps_all("id")), frame.where("rand() > -1")]):
            rows = chosen.count()
            assert data.write(chosen, str(tmp_path / f"{count}")).num_rows == rows
            stack.callback(chosen.cache().unpersist)
            with pytest.raises(ValueError, match=r"is cached and calls '.*'.*; set data='copy'"):
                data.write(chosen, str(tmp_path / "s"))
        # Other filters choose the same rows again.
        with_filter = frame.where("abs(id) > 3").cache()
        stack.callback(with_filter.unpersist)
        assert data.write(with_filter, str(tmp_path / "filtered")).num_rows == with_filter.count()


def test_values_that_arrow_reads_otherwise_are_refused(spark: Any, tmp_path: Path) -> None:
    pq.write_table(pa.table({"day": pa.array([-200_000, 3], pa.date32())}), tmp_path / "a.parquet")
    data = FitData(columns=("day",), root="", place="inPlace")
    with spark_conf(spark, {"spark.sql.parquet.datetimeRebaseModeInRead": "LEGACY"}):
        frame = spark.read.parquet(str(tmp_path / "a.parquet"))
        with pytest.raises(ValueError, match=r"'day' has other values in the files .*; set data='copy'"):
            data.write(frame, str(tmp_path / "s"))


def test_auto_logs_its_choice(spark: Any, table: str, tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    frame = spark.read.parquet(table).select("id", "wave")
    data = FitData(columns=("id", "wave"), root="", place="auto")
    with caplog.at_level(logging.WARNING):
        assert data.write(frame, str(tmp_path / "small")).file_columns is None
        monkeypatch.setattr(fit_data, "AUTO_BYTES", 1)
        assert data.write(frame, str(tmp_path / "large")).file_columns
        assert data.write(frame.orderBy("id"), str(tmp_path / "sorted")).file_columns is None
    assert [record.getMessage() for record in caplog.records] == [
        "data='auto' copies the rows: the files are smaller than 1 GiB",
        "data='auto' reads the rows in place, from files of 9 MiB",
        "data='auto' copies the rows: the DataFrame's plan has 'Sort'",
    ]


NAMES = ["a:b", "c,d", "e>f", "g<h", "i.j", "k l", "m`n", "o#p", "price (EUR)", "q[0]", "t=u", "x AS y"]
NAMES += ["'z'", '"q"', "cast(a as int)", "id#5", "st:struct<p:int>"]


def test_names_may_hold_the_marks_of_a_plan(spark: Any, tmp_path: Path) -> None:
    made = [f"id AS {quote(name)}" for name in NAMES]
    # A field of a struct has the name of a partition column, whose values are in no file.
    nested = "named_struct('a:b>', id, 'p', id) AS st"
    rows = spark.range(0, 9, 1, 1).selectExpr(*made, nested, "id % 3 AS p")
    rows.write.partitionBy("p").parquet(str(tmp_path / "rows"))
    frame = spark.read.parquet(str(tmp_path / "rows"))
    found = find_scan(frame, frame.columns).columns
    assert {name: column.name for name, column in found.items()} == {name: name for name in [*NAMES, "st"]}
    renamed = frame.select(F.col("`a:b`").alias("c>d"), (F.col("`c,d`") + 1).alias("e"), F.col("`e>f`"))
    found = find_scan(renamed, renamed.columns).columns
    assert {name: column.name for name, column in found.items()} == {"c>d": "a:b", "e>f": "e>f"}
