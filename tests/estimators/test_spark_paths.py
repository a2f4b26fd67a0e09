"""Paths without a scheme resolve like Spark resolves them, so a Pipeline saves and loads as a whole."""

import json
import os
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from programs import run_program
from pyspark.ml import Pipeline

from ringspark.estimators import TorchRegressor
from ringspark.estimators.stages.persistence import meaning_of
from ringspark.estimators.stages.storage_root import _session_folder
from ringspark.pipelines import spark_paths, storage
from ringspark.pipelines.spark_paths import is_remote, resolve

# A session whose default file system is a mount table: /data is a local folder, and / does not exist.
SESSION = """
import json, os, sys
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import VectorAssembler
from pyspark.sql import SparkSession
from ringspark.estimators import TorchRegressor
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest, cached_shards, write_shards

mounted, step = sys.argv[1:]
spark = (
    SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    .config("spark.hadoop.fs.defaultFS", "viewfs://table/")
    .config("spark.hadoop.fs.viewfs.mounttable.table.link./data", f"file://{mounted}")
    .config("spark.hadoop.fs.viewfs.mounttable.table.link./tmp", "file:///tmp")
    .getOrCreate()
)
rows = spark.range(64).selectExpr("id / 64 as x", "id / 32 as y")
spec = ModelSpec("linear", {"in_features": 1, "out_features": 1})
estimator = TorchRegressor(model=spec, labelCol="y", collective="local", epochs=1)
"""
SAVE_AND_LOAD = """
if step == "save":
    model = Pipeline(stages=[VectorAssembler(inputCols=["x"], outputCol="features"), estimator]).fit(rows)
    model.save("/data/pipe/line")
    model.write().overwrite().save("/data/pipe/line")
else:
    model = PipelineModel.load("/data/pipe/line")
print(json.dumps([row.prediction for row in model.transform(rows).collect()]))
"""
TRAIN = """
rows = rows.selectExpr("array(x) as v", "y")
made = estimator.setParams(inputCols=["v"])
at_mount = write_shards(rows, "/data/shards")
cached = cached_shards(rows, "/data/cache", key="v1")
on_disk = write_shards(rows, f"file:{mounted}/disk")
# What is returned means the same when it is given again, to us and to Spark.
again = [made.copy({made.runUri: run}).fitOnShards(shards.uri)
         for run, shards in (("/data/run-0", at_mount), ("/data/run-1", on_disk))]
resumed = made.copy({made.runUri: again[0].summary.run_uri, made.resume: True}).fitOnShards("/data/shards")
fitted = made.copy({made.storageUri: "/data/storage"}).fit(rows)
print(json.dumps({
    "uris": [at_mount.uri, on_disk.uri, cached.uri, resumed.summary.run_uri, fitted.summary.run_uri],
    "rows": [spark.read.parquet(*m.paths).count() for m in (at_mount, on_disk, cached)],
    "read": [ShardManifest.load(m.uri).num_rows for m in (at_mount, on_disk, cached)],
}))
"""


def run(script: str, *arguments: str) -> Any:
    """Returns the last line that a new session prints; a JVM has one default file system."""
    return json.loads(run_program(SESSION + script, *arguments).stdout.splitlines()[-1])


@pytest.mark.spark
@pytest.mark.telling
def test_a_pipeline_saved_under_a_mount_of_hadoops_is_in_one_place(tmp_path):
    told = [run(SAVE_AND_LOAD, str(tmp_path), step) for step in ("save", "load")]
    assert told[0] == told[1]
    assert not os.path.exists("/data/pipe")
    stages = tmp_path / "pipe" / "line" / "stages"
    assert sorted(os.listdir(tmp_path / "pipe")) == ["line"]
    names = {path.name.rsplit("_", 1)[0] for path in stages.iterdir()}
    assert names == {"0_VectorAssembler", "1_TorchRegressor"}


@pytest.mark.spark
@pytest.mark.slow
def test_every_path_of_a_user_lies_where_spark_means_it(tmp_path):
    found = run(TRAIN, str(tmp_path), "train")
    mount = f"file://{tmp_path}"
    assert found["uris"][:2] == [f"{mount}/shards", f"{mount}/disk"]
    assert found["uris"][2].startswith(f"{mount}/cache/")
    assert found["uris"][3] == f"{mount}/run-0"
    assert found["uris"][4].startswith(f"{mount}/storage/run-")
    assert found["rows"] == found["read"] == [64, 64, 64]
    assert set(os.listdir(tmp_path)) == {"cache", "disk", "run-0", "run-1", "shards", "storage"}
    assert not os.path.exists("/data/shards")


@pytest.mark.spark
def test_a_path_is_what_it_is_to_spark_or_refused(spark, mounts, caplog):
    for given in ("/data/x", f"viewfs://{mounts.name}/data/x", f"file:{mounts}/x", f"file://{mounts}/x"):
        assert resolve(spark, given) == f"file://{mounts}/x"
    assert resolve(spark, "s3://bucket/x/") == "s3://bucket/x"
    # A "%" is literal, even if a path is resolved twice.
    assert resolve(spark, resolve(spark, "/data/m%3An")) == f"file://{mounts}/m%3An"
    for given, told in (
        ("/nowhere/x", r"resolves '/nowhere/x' to 'viewfs://.*/nowhere/x', a mount that only Hadoop knows"),
        ("x", r"resolves 'x' to 'viewfs://.*/x', a mount that only Hadoop knows"),
        ("dbfs:/x", r"Spark cannot resolve 'dbfs:/x' \(.*scheme \"dbfs\"\); pass a complete URI"),
        ("~/x", r"is in a folder named '~' in viewfs://.*/; pass the whole path, or 'file:/"),
    ):
        with pytest.raises(ValueError, match=told):
            resolve(spark, given)
    assert not caplog.records
    # /usr/share exists on this machine, but not in the mount.
    assert resolve(spark, "/usr/share") == f"file://{mounts}/share"
    (warning,) = [record.getMessage() for record in caplog.records]
    assert f"resolves '/usr/share' to '{mounts}/share'" in warning
    assert "pass 'file:/usr/share' to use the local folder" in warning


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_on_databricks_a_mount_is_a_mount(monkeypatch, spark):
    """A partial test: the default file system here is the local disk, not Databricks'."""
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "15.4")
    assert resolve(spark, "/Volumes/main/default/x/") == "/Volumes/main/default/x"
    assert resolve(spark, "/dbfs/tmp/x") == "/dbfs/tmp/x"
    assert storage.mount_of("dbfs:/tmp/x") == "/dbfs/tmp/x"
    assert storage.mount_of("dbfs:///Volumes/main/x") == "/Volumes/main/x"


@pytest.mark.spark
@pytest.mark.modes
@pytest.mark.usefixtures("spark")
def test_on_a_local_default_a_path_means_the_local_disk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert meaning_of(str(tmp_path / "a b%")) == str(tmp_path / "a b%")
    assert meaning_of(f"file://{tmp_path}/x") == meaning_of(f"file:{tmp_path}/x") == f"{tmp_path}/x"
    assert meaning_of("s3://bucket/x/") == "s3://bucket/x"
    assert meaning_of(str(tmp_path / "a%20b")) == str(tmp_path / "a%20b")
    refusal = r"'~/x' is a folder named '~' to Spark; give the whole path, '.+/x'"
    with pytest.raises(ValueError, match=refusal):
        meaning_of("~/x")


@pytest.mark.spark
@pytest.mark.modes
@pytest.mark.usefixtures("spark")
def test_a_pipeline_is_in_one_folder_whatever_its_name(tmp_path):
    uri = f"file://{tmp_path}/p%20q"
    Pipeline(stages=[TorchRegressor()]).save(uri)
    assert os.listdir(tmp_path) == ["p%20q"]
    assert len(Pipeline.load(uri).getStages()) == 1


@pytest.mark.spark
@pytest.mark.connect
def test_a_connect_server_with_another_default_is_asked_once_and_not_for_own_folders(spark, monkeypatch):
    if not is_remote(spark):
        pytest.skip("Spark Classic asks Hadoop itself")
    monkeypatch.setattr(spark_paths, "_DEFAULTS", WeakKeyDictionary())
    spark.conf.set("fs.viewfs.mounttable.table.link./tmp", "file:///tmp")
    spark.conf.set("fs.defaultFS", "viewfs://table/")
    try:
        with pytest.raises(ValueError, match=r"'x' is below a folder that only the .* server knows"):
            resolve(spark, "x")
    finally:
        spark.conf.unset("fs.defaultFS")
    with pytest.raises(ValueError, match=r"resolves '/x' to 'viewfs://table/x', a mount that only Hadoop"):
        resolve(spark, "/x")


@pytest.mark.parametrize("uri", ["hdfs:/x", "dbfs:/x", "abfs:/x"])
def test_a_uri_that_leaves_the_host_to_hadoop_is_no_folder_of_that_name(uri):
    refusal = "does not name the host of its store, which only Hadoop knows; add the host"
    with pytest.raises(ValueError, match=refusal):
        storage.normalize(uri)


def test_hadoop_names_the_host_of_hdfs_without_one(spark):
    """tests/places has an HDFS that is the default file system."""
    if is_remote(spark):
        pytest.skip("Spark Classic asks Hadoop itself")
    with pytest.raises(
        ValueError, match=r"Spark cannot resolve 'hdfs:///x' \(.*[Ii]ncomplete HDFS URI, no host"
    ):
        resolve(spark, "hdfs:///x")


def test_storage_is_required_where_executors_are_elsewhere():
    with pytest.raises(ValueError, match="storageUri is not set; on master 'yarn' give a folder"):
        _session_folder("yarn")
    assert os.path.isdir(_session_folder("local[2]"))
