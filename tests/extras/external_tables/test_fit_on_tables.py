"""`fitOnParquet` and `fitOnDelta`: training on external tables equals training on shards of the same rows."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from acting_callback import Acts
from failing_callback import Fails
from lake_tables import delete_delta_rows, encode_vector
from parity import assert_equal_weights
from pyspark.sql import functions as F
from torch import nn

from ringspark.estimators import Callback, TorchClassifier, TorchRegressor, TrainingState, WorkerError
from ringspark.extras.external_tables.in_place.delta import list_delta
from ringspark.extras.external_tables.in_place.table_frame import read_listing
from ringspark.models import ModelSpec
from ringspark.pipelines import HashBuckets, ShardManifest, Vocabulary, write_shards

deltalake = pytest.importorskip("deltalake")

pytestmark = pytest.mark.spark


class Places(nn.Module):
    """Ids of each table (batch,), and (batch, 2) sizes -> (batch, outputs)."""

    def __init__(self, tables: list[int], outputs: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(nn.Embedding(rows, 3) for rows in tables)
        self.out = nn.Linear(3 * len(tables) + 2, outputs)

    def forward(self, *inputs: Any) -> Any:
        *ids, size = inputs
        rows = [table(own) for table, own in zip(self.tables, ids, strict=True)]
        return self.out(torch.cat([*rows, size], 1))


@pytest.fixture(scope="module")
def table(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """240 rows in folders by region: a city, its class as a string, two sizes."""
    root = str(tmp_path_factory.mktemp("tables") / "table")
    number, cities = F.col("id"), F.array(*map(F.lit, ("Bern", "Oslo", "Rome")))
    spark.range(0, 240, 1, 1).select(
        number,
        F.element_at(cities, (number % 3 + 1).cast("int")).alias("city"),
        F.when(number % 3 == 2, "warm").otherwise("cold").alias("weather"),
        F.array(number / 240, F.lit(1.0)).alias("size"),
        F.concat(F.lit("r "), (number / 130).cast("int")).alias("region"),
    ).write.partitionBy("region").parquet(root)
    return root


def _classifier(tmp_path: Path, **params: Any) -> TorchClassifier:
    settings: dict[str, Any] = {"model": Places([4, 9], 2), "inputCols": ["city", "region", "size"]}
    settings |= {"labelCol": "weather", "columns": {"city": Vocabulary(), "region": HashBuckets(9)}}
    settings |= {"epochs": 3, "batchSize": 16, "learningRate": 0.1, "metrics": ["accuracy"]}
    settings |= {"storageUri": str(tmp_path), "showProgress": False}
    return TorchClassifier(**(settings | params))


def _linear(tmp_path: Path, **params: Any) -> TorchRegressor:
    settings: dict[str, Any] = {"model": ModelSpec("linear", {"in_features": 2, "out_features": 1})}
    settings |= {"featuresCol": "size", "labelCol": "id", "epochs": 2, "batchSize": 24}
    settings |= {"learningRate": 0.05, "storageUri": str(tmp_path), "showProgress": False}
    return TorchRegressor(**(settings | params))


def test_a_fit_on_a_table_is_the_fit_on_shards_of_it(spark: Any, table: str, tmp_path: Path) -> None:
    frame = spark.read.parquet(table)
    kinds = {"city": Vocabulary(), "region": HashBuckets(9), "weather": Vocabulary()}
    shards = write_shards(frame.orderBy("id").coalesce(1), str(tmp_path / "shards"), columns=kinds).uri
    in_order = _classifier(tmp_path / "runs", shuffle=False)
    on_table = in_order.fitOnParquet(table)
    in_order.clear(in_order.columns)  # the shards already record the column types
    on_shards = in_order.fitOnShards(shards)
    assert_equal_weights(on_table, on_shards)
    assert on_table.labels == ["cold", "warm"]
    assert list(on_table.summary.history.rows) == [240] * 3
    # Only the runs remain; each fit removes its temporary manifest.
    assert {path.name.split("-")[0] for path in (tmp_path / "runs").iterdir()} == {"run"}


def test_two_workers_train_what_one_trains_and_go_on_where_it_failed(table: str, tmp_path: Path) -> None:
    alone = _linear(tmp_path, numWorkers=1).fitOnParquet(table)
    settings = {"numWorkers": 2, "collective": "torch", "storageUri": None, "runUri": str(tmp_path / "run")}
    settings |= {"checkpointEverySteps": 3, "callbacks": [Fails(tmp_path / "failed")]}
    with pytest.raises(WorkerError, match=r"step 7.*resume=True"):
        _linear(tmp_path, **settings).fitOnParquet(table)
    manifest = ShardManifest.load(tmp_path / "run" / "shards")
    assert manifest.file_columns
    resumed = _linear(tmp_path, **(settings | {"numWorkers": 1}), resume=True).fitOnParquet(table)
    assert_equal_weights(resumed, alone, 1e-5)
    assert resumed.summary.resumed_steps == (6,)


def test_a_table_that_changed_is_never_trained_on_in_silence(table: str, tmp_path: Path) -> None:
    root = tmp_path / "table"
    root.mkdir()
    file = root / "a.parquet"
    pq.write_table(pa.table({"id": range(96), "size": [[n / 96, 1.0] for n in range(96)]}), file)

    rewrites = Acts(epoch_end=lambda state: pq.write_table(pq.read_table(str(file)), str(file)))
    rewriting = _linear(tmp_path, callbacks=[rewrites], cache="none")
    with pytest.raises(WorkerError, match=r"has changed since the training listed its table"):
        rewriting.fitOnParquet(str(root))
    run = {"runUri": str(tmp_path / "run"), "storageUri": None}
    _linear(tmp_path, **run).fitOnParquet(str(root))
    # Resuming a finished run returns its model; resuming with another table fails.
    _linear(tmp_path, **run, resume=True).fitOnParquet(str(root))
    pq.write_table(pq.read_table(file), root / "more.parquet")
    with pytest.raises(ValueError, match="train rows: 96 -> 192"):
        _linear(tmp_path, **run, resume=True).fitOnParquet(str(root))
    with pytest.raises(ValueError, match="train rows: 96 -> 240"):
        _linear(tmp_path, **run, resume=True).fitOnParquet(table)


def _write_delta(uri: str, first: int, rows: int, **settings: Any) -> None:
    ids = list(range(first, first + rows))
    regions = [("r 0", "a/b=100%")[n % 2] for n in ids]
    data = {"id": ids, "size": [[n / 100, 1.0] for n in ids], "region": regions}
    deltalake.write_deltalake(uri, pa.table(data), partition_by=["region"], **settings)


@pytest.mark.slow
def test_a_delta_table_is_trained_at_one_version(spark: Any, tmp_path: Path) -> None:
    root = str(tmp_path / "delta")
    _write_delta(root, 0, 60)
    _write_delta(root, 60, 40, mode="append")
    run = {"runUri": str(tmp_path / "run"), "storageUri": None}
    first = _linear(tmp_path, **run).fitOnDelta(root, version=0)
    assert list(first.summary.history.rows) == [60, 60]
    assert list(_linear(tmp_path).fitOnDelta(root).summary.history.rows) == [100, 100]
    # Files that the newest table version no longer lists are not read.
    _write_delta(root, 0, 10, mode="overwrite")
    newest = _linear(tmp_path).fitOnDelta(root)
    assert list(newest.summary.history.rows) == [10, 10]
    # The run resumes with its own table version, not the newest.
    assert_equal_weights(_linear(tmp_path, **run, resume=True).fitOnDelta(root), first)
    with pytest.raises(ValueError, match=r"delta' version 0 -> .*delta' version 1"):
        _linear(tmp_path, **run, resume=True).fitOnDelta(root, version=1)
    frame = spark.read.parquet(*deltalake.DeltaTable(root).file_uris())
    assert newest.transform(frame).count() == 10


class Changes(Callback):
    """Replaces the rows of a Delta table in the first epoch; with `vacuums`, also removes its old files."""

    def __init__(self, root: str, vacuums: bool) -> None:
        self._root, self._vacuums, self._done = root, vacuums, False

    def on_epoch_end(self, state: TrainingState) -> None:
        if self._done:
            return
        self._done = True
        _write_delta(self._root, 0, 10, mode="overwrite")
        if self._vacuums:
            table = deltalake.DeltaTable(self._root)
            assert table.vacuum(0, dry_run=False, enforce_retention_duration=False)


@pytest.mark.slow
def test_deleted_rows_mapped_columns_and_odd_folders_are_those_of_a_copy(spark: Any, tmp_path: Path) -> None:
    root = tmp_path / "delta"
    _write_delta(str(root), 0, 200, configuration={"delta.columnMapping.mode": "name"})
    (first, *_) = pa.table(deltalake.DeltaTable(str(root)).get_add_actions()).column("path").to_pylist()
    delete_delta_rows(root, "u", {first: (encode_vector(range(0, 90, 7)), 13)})
    columns = {"region": Vocabulary()}

    def with_region(**params: Any) -> TorchRegressor:
        given = {"inputCols": ["region", "size"], "model": Places([5], 1), "cache": "none"}
        found = _linear(tmp_path, **given, **params)
        found.clear(found.featuresCol)
        return found

    frame = read_listing(spark, list_delta(spark, str(root))).select("id", "size", "region")
    copied = with_region().fitOnShards(write_shards(frame, str(tmp_path / "shards"), columns=columns).uri)
    # The version is pinned: another write during the training changes nothing.
    writes, removes = (Changes(str(root), vacuums=vacuums) for vacuums in (False, True))
    model = with_region(columns=columns, callbacks=[writes]).fitOnDelta(str(root))
    assert list(model.summary.history.rows) == [187, 187]
    assert deltalake.DeltaTable(str(root)).version() == 2
    assert_equal_weights(model, copied)
    assert_equal_weights(with_region(columns=columns).fitOnDelta(str(root), version=1), copied)
    # If the files are removed, the training ends.
    with pytest.raises(WorkerError, match=r"FileNotFoundError.* do not change a table"):
        with_region(columns=columns, callbacks=[removes]).fitOnDelta(str(root), version=1)


def test_what_is_no_delta_table_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "delta"
    _write_delta(str(root), 0, 10)
    with pytest.raises(ValueError, match=r"is a Delta table, .* use fitOnDelta"):
        _linear(tmp_path).fitOnParquet(str(root))
    with pytest.raises(ValueError, match="cannot be read as a Delta table of version 7"):
        _linear(tmp_path).fitOnDelta(str(root), version=7)
