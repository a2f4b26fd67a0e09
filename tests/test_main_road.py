"""End to end with real parts: a Pipeline is fitted on two Horovod ranks with Petastorm readers, saved,
loaded in a new Python, and predicts the same.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.ml import Pipeline
from pyspark.ml.feature import StandardScaler, VectorAssembler

from ringspark.estimators import TorchClassifier
from ringspark.models import ModelSpec

LOAD = """
import json, sys
from pyspark.ml import PipelineModel
from pyspark.sql import SparkSession

saved, rows, output = sys.argv[1:]
builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
spark = builder.config("spark.driver.bindAddress", "127.0.0.1").getOrCreate()
frame = spark.createDataFrame(json.loads(rows), "a double, b double")
scored = PipelineModel.load(saved).transform(frame).collect()
with open(output, "w") as file:
    json.dump([[row.prediction, list(row.probability)] for row in scored], file)
spark.stop()
"""


@pytest.mark.telling
@pytest.mark.spark
@pytest.mark.distributed
@pytest.mark.usefixtures("spark")
def test_a_pipeline_is_fitted_saved_and_loaded_in_a_new_process(spark: Any, tmp_path: Path) -> None:
    rows = [(float(i % 17) - 8, float(i % 11) - 5) for i in range(400)]
    labelled = [(a, b, float(a + b > 0)) for a, b in rows]
    table = spark.createDataFrame(labelled, "a double, b double, label double")
    network = TorchClassifier(
        model=ModelSpec("mlp", {"in_features": 2, "hidden": [16], "out_features": 2}),
        featuresCol="scaled",
        collective="horovod",
        reader="petastorm",
        numWorkers=2,
        epochs=3,
        batchSize=32,
        learningRate=0.05,
        storageUri=str(tmp_path / "storage"),
        showProgress=False,
    )
    assemble = VectorAssembler(inputCols=["a", "b"], outputCol="features")
    scale = StandardScaler(inputCol="features", outputCol="scaled")
    model = Pipeline(stages=[assemble, scale, network]).fit(table)
    assert model.stages[-1].summary.epochs[-1].rows == 400
    model.save(str(tmp_path / "model"))
    sample = rows[:40]
    scored = model.transform(spark.createDataFrame(sample, "a double, b double")).collect()
    assert sum(row.prediction == float(a + b > 0) for row, (a, b) in zip(scored, sample, strict=True)) >= 36

    output = tmp_path / "scored.json"
    command = [sys.executable, "-c", LOAD, str(tmp_path / "model"), json.dumps(sample), str(output)]
    environment = os.environ | {"PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    loaded = json.loads(output.read_text())
    assert [prediction for prediction, _ in loaded] == [row.prediction for row in scored]
    # The new session uses fewer tasks, and some processors round differently at another batch size.
    for (_, probability), row in zip(loaded, scored, strict=True):
        assert probability == pytest.approx(list(row.probability), abs=1e-6)
