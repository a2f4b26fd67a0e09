"""Trainings on a real YARN, with rows, runs and models on its HDFS."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hadoop import ROOT, Hadoop
from programs import run_program
from small_networks import linear
from spark_tables import quiet, waves

from ringspark.estimators import TorchRegressor
from ringspark.pipelines import storage

# The driver of an application in client mode: trains, and prints what a test compares.
PROGRAM = """
import json, os, signal, sys
from pathlib import Path
from pyspark.sql import SparkSession
from small_networks import linear
from spark_tables import quiet, waves
from ringspark.estimators import Callback, TorchRegressionModel, TorchRegressor

root, mark = sys.argv[1], Path(sys.argv[2])


class KillsItsExecutor(Callback):
    def on_step_end(self, state):
        if state.step == 12 and state.rank == 1 and not mark.exists():
            mark.touch()
            process = os.getpid()
            while b"ExecutorBackend" not in Path(f"/proc/{process}/cmdline").read_bytes():
                process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
            os.kill(process, signal.SIGKILL)


spark = SparkSession.builder.master("yarn").getOrCreate()
table = waves(spark)
params = dict(model=linear(), epochs=3, batchSize=16, numWorkers=2, seed=1, checkpointEverySteps=5)
estimator = quiet(TorchRegressor, root, **params, runUri=f"{root}/run", callbacks=[KillsItsExecutor()])
model = estimator.fit(table)
model.write().overwrite().save(f"{root}/model")
loaded = TorchRegressionModel.load(f"{root}/model")
rows = loaded.transform(table).select("prediction").collect()
found = {"restarts": model.summary.restarts, "reasons": [*model.summary.restart_reasons]}
found["preemptions"] = [*model.summary.preemption_reasons]
found["resumed"], found["run"] = [*model.summary.resumed_steps], model.summary.run_uri
found["weights"] = [value.tolist() for value in model.module().state_dict().values()]
found["rows"] = len(rows)
print("FOUND", json.dumps(found))
spark.stop()
"""
JOB = """stage: TorchRegressor
data:
  parquet: {uri}/rows
params:
  model: {{target: linear, kwargs: {{in_features: 2, out_features: 1}}}}
  epochs: 2
  batchSize: 16
  numWorkers: 2
  runUri: {uri}/run
save:
  model: {uri}/model
"""

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.fixture
def yarn(cluster: Hadoop) -> Hadoop:
    cluster.start_yarn()
    return cluster


@pytest.fixture(scope="module")
def calm(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The weights of the program's training on a local master, without a failure."""
    params: dict[str, Any] = {"model": linear(), "epochs": 3, "batchSize": 16, "numWorkers": 2, "seed": 1}
    model = quiet(TorchRegressor, tmp_path_factory.mktemp("calm"), **params).fit(waves(spark))
    return [value.tolist() for value in model.module().state_dict().values()]


def _train(yarn: Hadoop, folder: Path, root: str, **conf: object) -> dict[str, Any]:
    environment = yarn.client_environment(**conf)
    done = run_program(PROGRAM, root, folder / "killed", folder=folder, env=environment)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    return dict(json.loads(line.removeprefix("FOUND ")))


def test_a_killed_executor_of_a_client_costs_no_step(yarn: Hadoop, calm: list[Any], tmp_path: Path) -> None:
    """A path without a scheme is on HDFS, which is YARN's default file system."""
    found = _train(yarn, tmp_path, "/client")
    assert found["run"] == f"{yarn.uri}/client/run"
    assert found["resumed"] == [10]
    assert found["rows"] == 96
    assert found["weights"] == calm
    assert "model" in storage.list_names(f"{yarn.uri}/client")


def test_dynamic_allocation_replaces_a_killed_executor(yarn: Hadoop, calm: list[Any], tmp_path: Path) -> None:
    dynamic = {"spark_dynamicAllocation_enabled": "true", "spark_dynamicAllocation_maxExecutors": 2}
    dynamic |= {"spark_dynamicAllocation_shuffleTracking_enabled": "true", "spark_executor_instances": 1}
    found = _train(yarn, tmp_path, "hdfs:///dynamic", **dynamic)
    assert found["run"] == f"{yarn.uri}/dynamic/run"
    assert found["resumed"] == [10]
    assert len(found["reasons"]) + len(found["preemptions"]) == 1
    assert found["weights"] == calm


def test_a_job_file_trains_in_cluster_mode(yarn: Hadoop, spark: Any, tmp_path: Path) -> None:
    """Neither storageUri nor an archive is set."""
    uri = f"{yarn.uri}/job"
    rows = tmp_path / "rows"
    waves(spark).write.parquet(str(rows))
    yarn.shell("-mkdir", "-p", "/job")
    yarn.shell("-put", str(rows), "/job/rows")
    (tmp_path / "job.yaml").write_text(JOB.format(uri=uri))
    submit = str(Path(sys.executable).with_name("spark-submit"))
    command = [submit, "--master", "yarn", "--deploy-mode", "cluster", "--files", str(tmp_path / "job.yaml")]
    done = subprocess.run(
        [*command, str(ROOT / "jobs" / "command.py"), "train", "job.yaml"],
        env=yarn.client_environment(spark_driver_memoryOverhead="1g"),
        capture_output=True, text=True, cwd=tmp_path, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:] + yarn.read_containers()[-6000:]
    assert storage.list_names(f"{uri}/model")
    assert storage.exists(f"{uri}/run")
