"""A path without a scheme lies where Spark means it: a Pipeline saved there is whole, and loads again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringspark.estimators.stages.spark_paths import meaning_of
from ringspark.pipelines import storage

# A session whose default file system is a table of mounts: /data is a folder of the disk, and / is nothing.
SCRIPT = """
import json, sys
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import VectorAssembler
from pyspark.sql import SparkSession
from ringspark.estimators import TorchRegressor
from ringspark.models import ModelSpec

mounted, step = sys.argv[1:]
spark = (
    SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    .config("spark.hadoop.fs.defaultFS", "viewfs://table/")
    .config("spark.hadoop.fs.viewfs.mounttable.table.link./data", f"file://{mounted}")
    .config("spark.hadoop.fs.viewfs.mounttable.table.link./tmp", "file:///tmp")
    .getOrCreate()
)
rows = spark.range(64).selectExpr("id / 64 as x", "id / 32 as y")
if step == "save":
    stage = TorchRegressor(model=ModelSpec("linear", {"in_features": 1, "out_features": 1}), labelCol="y",
                           collective="local", epochs=1)
    model = Pipeline(stages=[VectorAssembler(inputCols=["x"], outputCol="features"), stage]).fit(rows)
    model.save("/data/pipe/line")
    model.write().overwrite().save("/data/pipe/line")
else:
    model = PipelineModel.load("/data/pipe/line")
print(json.dumps([row.prediction for row in model.transform(rows).collect()]))
"""


@pytest.mark.spark
def test_a_pipeline_saved_under_a_mount_of_hadoops_is_in_one_place(tmp_path: Path) -> None:
    """In new sessions: the default file system is a setting of the JVM."""
    told = []
    for step in ("save", "load"):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path), step], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        told.append(json.loads(done.stdout.splitlines()[-1]))
    assert told[0] == told[1]
    assert not os.path.exists("/data/pipe")
    stages = tmp_path / "pipe" / "line" / "stages"
    assert sorted(os.listdir(tmp_path / "pipe")) == ["line"]
    assert {path.name.rsplit("_", 1)[0] for path in stages.iterdir()} == {
        "0_VectorAssembler",
        "1_TorchRegressor",
    }


@pytest.mark.spark
@pytest.mark.modes
@pytest.mark.usefixtures("spark")
def test_on_a_local_default_a_path_means_the_local_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert meaning_of(str(tmp_path / "a b%")) == str(tmp_path / "a b%")
    assert meaning_of(f"file://{tmp_path}/x") == meaning_of(f"file:{tmp_path}/x") == f"{tmp_path}/x"
    assert meaning_of("s3://bucket/x/") == "s3://bucket/x"
    assert meaning_of(str(tmp_path / "a%20b")) == str(tmp_path / "a%20b")
    with pytest.raises(
        ValueError, match=r"'~/x' is a folder named '~' to Spark; give the whole path, '.+/x'"
    ):
        meaning_of("~/x")


@pytest.mark.parametrize("uri", ["hdfs:/x", "dbfs:/x", "abfs:/x"])
def test_a_uri_that_leaves_the_host_to_hadoop_is_no_folder_of_that_name(uri: str) -> None:
    with pytest.raises(
        ValueError, match="leaves the host of its store to Hadoop's configuration; give it, as in"
    ):
        storage.normalize(uri)
