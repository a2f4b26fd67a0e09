"""Fits on a standalone cluster with dynamic allocation, from no executor on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from standalone import spark_environment, standalone_cluster

_PROGRAM = """
import json, sys, threading
from pyspark.sql import SparkSession
from ringspark.estimators import TorchRegressor
from ringspark.models import ModelSpec

url, mode, storage = sys.argv[1:]
builder = SparkSession.builder.master(url).config("spark.api.mode", mode)
for key, value in {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.minExecutors": "0",
    "spark.dynamicAllocation.executorIdleTimeout": "5s",
    "spark.executor.cores": "1",
    "spark.executor.memory": "700m",
    "spark.speculation": "true",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}.items():
    builder = builder.config(key, value)
spark = builder.getOrCreate()
rows = spark.range(200).selectExpr("array(id / 200, id % 7 / 7) AS features", "double(id % 7) AS label")
losses = {}
for collective in ("torch", "horovod"):
    network = ModelSpec("mlp", {"in_features": 2, "hidden": [8], "out_features": 1})
    fit = TorchRegressor(
        model=network, numWorkers=2, epochs=2, batchSize=20, collective=collective, storageUri=storage,
        showProgress=False, reader="arrow", seed=3,
    )
    model = fit.fit(rows)
    losses[collective] = [record.train_loss for record in model.summary.epochs]
    assert model.transform(rows).count() == 200
print(json.dumps(losses))
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["classic", "connect"])
def test_a_fit_starts_from_no_executor(tmp_path: Path, mode: str) -> None:
    """Spark refuses a barrier stage here, so the workers are ordinary tasks."""
    pytest.importorskip("horovod")
    with standalone_cluster(tmp_path) as url:
        ran = subprocess.run(
            [sys.executable, "-c", _PROGRAM, url, mode, str(tmp_path / "storage")],
            env=spark_environment(), capture_output=True, text=True, timeout=560, check=False,
        )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    losses = json.loads(ran.stdout.strip().splitlines()[-1])
    assert losses["torch"] == pytest.approx(losses["horovod"], rel=1e-5)
