"""Trainings on a real YARN, with rows, runs and models on its HDFS."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import run_ringspark
from hadoop import ROOT, Hadoop
from programs import run_program
from small_networks import linear
from spark_tables import quiet, waves
from waiting import wait_for

from ringspark.estimators import TorchRegressor
from ringspark.pipelines import storage

# The driver of an application in client mode: trains, and prints what a test compares.
PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
from pyspark.sql import SparkSession
from small_networks import linear
from spark_tables import quiet, waves
from ringspark.estimators import Callback, TorchRegressionModel, TorchRegressor

root, mark = sys.argv[1], Path(sys.argv[2])


def kill():
    process = os.getpid()
    while b"ExecutorBackend" not in Path(f"/proc/{process}/cmdline").read_bytes():
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(process, signal.SIGKILL)


def take_memory():
    taken = bytearray(os.urandom(1 << 20) * 1500)
    time.sleep(60)


def wait_for_the_other_queue():
    while not mark.with_suffix(".over").exists():
        time.sleep(0.2)


class Acts(Callback):
    # Does something in one step of rank 1.

    def __init__(self, act):
        self.act = act

    def on_step_end(self, state):
        if state.step == 12 and state.rank == 1 and not mark.exists():
            mark.touch()
            self.act()


spark = SparkSession.builder.master("yarn").getOrCreate()
table = waves(spark)
params = dict(model=linear(), epochs=3, batchSize=16, numWorkers=2, seed=1, checkpointEverySteps=5)
params |= json.loads(sys.argv[3]) | dict(callbacks=[Acts(globals()[sys.argv[4]])])
estimator = quiet(TorchRegressor, root, **params, runUri=f"{root}/run")
try:
    model = estimator.fit(table)
except (ValueError, RuntimeError) as error:
    print("FOUND", json.dumps(str(error)))
    sys.exit()
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

# An application that needs memory which another queue has borrowed.
OTHER = """
from pyspark.sql import SparkSession
assert SparkSession.builder.master("yarn").getOrCreate().range(10).count() == 10
"""
# Spark starts an application with the executors that it has after 30 s.
LATE_SECONDS = float(os.environ.get("RINGSPARK_LATE_SECONDS", "45"))

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


def _start(yarn: Hadoop, folder: Path, root: str, act: str, params: dict[str, Any], **conf: object) -> Any:
    """Returns what the program found, or the sentence of the error."""
    environment = yarn.client_environment(**conf)
    done = run_program(
        PROGRAM, root, folder / "mark", json.dumps(params), act, folder=folder, env=environment
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    print(line)
    return json.loads(line.removeprefix("FOUND "))


def test_a_killed_executor_of_a_client_costs_no_step(yarn: Hadoop, calm: list[Any], tmp_path: Path) -> None:
    """A path without a scheme is on HDFS, which is YARN's default file system."""
    found = _start(yarn, tmp_path, "/client", "kill", {})
    assert found["run"] == f"{yarn.uri}/client/run"
    assert found["resumed"] == [10]
    assert found["rows"] == 96
    assert found["weights"] == calm
    assert "model" in storage.list_names(f"{yarn.uri}/client")


def test_dynamic_allocation_replaces_a_killed_executor(yarn: Hadoop, calm: list[Any], tmp_path: Path) -> None:
    dynamic = {"spark_dynamicAllocation_enabled": "true", "spark_dynamicAllocation_maxExecutors": 2}
    dynamic |= {"spark_dynamicAllocation_shuffleTracking_enabled": "true", "spark_executor_instances": 1}
    found = _start(yarn, tmp_path, "hdfs:///dynamic", "kill", {}, **dynamic)
    assert found["run"] == f"{yarn.uri}/dynamic/run"
    assert found["resumed"] == [10]
    assert len(found["reasons"]) + len(found["preemptions"]) == 1
    assert found["weights"] == calm


def test_the_check_of_a_cluster_trains_on_yarn(yarn: Hadoop) -> None:
    place = ("--master", "yarn", "--storage-uri", "hdfs:///check")
    done = run_ringspark("check", *place, **yarn.client_environment())
    print(done.stdout)
    assert done.stdout.endswith("ready to train\n"), done.stdout + done.stderr[-2000:]


def test_a_container_killed_for_memory_is_named(yarn: Hadoop, tmp_path: Path) -> None:
    sentence = _start(yarn, tmp_path, "/memory", "take_memory", {"maxRestarts": 0})
    assert re.search(r"physical memory used.*raise spark\.executor\.memoryOverhead", sentence), sentence
    assert "\n" not in sentence


def test_a_queue_without_room_is_named(yarn: Hadoop, tmp_path: Path) -> None:
    sentence = _start(yarn, tmp_path, "/small", "kill", {"timeoutSeconds": 30}, spark_yarn_queue="small")
    assert sentence.startswith("numWorkers (2) must not exceed the 1 task slots of the cluster (yarn)")
    assert "the conf promises 2 slots, but the cluster did not provide them within 30 s; lower" in sentence


def test_a_queue_that_takes_its_share_back_costs_no_restart(
    yarn: Hadoop, calm: list[Any], tmp_path: Path
) -> None:
    def use_the_other_queue() -> None:
        wait_for("step 12", (tmp_path / "mark").exists, seconds=300)
        conf = {"spark_yarn_queue": "other", "spark_executor_memory": "4g", "spark_executor_instances": 1}
        run_program(OTHER, env=yarn.client_environment(**conf))
        (tmp_path / "mark.over").touch()

    other = threading.Thread(target=use_the_other_queue)
    other.start()
    act, params = "wait_for_the_other_queue", {"minWorkers": 1, "timeoutSeconds": 300}
    found = _start(yarn, tmp_path, "/preempted", act, params, spark_executor_memory="6g")
    other.join()
    assert found["reasons"] == []
    assert len(found["preemptions"]) == 1
    for weights, expected in zip(found["weights"], calm, strict=True):
        np.testing.assert_allclose(weights, expected, atol=1e-6)


def test_a_job_file_trains_in_cluster_mode(yarn: Hadoop, spark: Any, tmp_path: Path) -> None:
    """Neither storageUri nor an archive is set."""
    uri = _job(yarn, spark, tmp_path)
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


def _job(yarn: Hadoop, spark: Any, folder: Path) -> str:
    """Writes rows to HDFS, and a job file here; returns their folder on HDFS."""
    uri, rows = f"{yarn.uri}/{folder.name}", folder / "rows"
    waves(spark).write.parquet(str(rows))
    yarn.shell("-mkdir", "-p", f"/{folder.name}")
    yarn.shell("-put", str(rows), f"/{folder.name}/rows")
    (folder / "job.yaml").write_text(JOB.format(uri=uri))
    return uri


def test_the_packed_environment_trains_where_a_node_comes_late(
    cluster: Hadoop, packed: Path, spark: Any, tmp_path: Path
) -> None:
    """The first node has room for the driver and one worker; the hosts have no Python packages."""
    cluster.start_yarn(megabytes=4096)
    uri = _job(cluster, spark, tmp_path)
    (tmp_path / packed.name).symlink_to(packed)
    bare = {f"spark_{kind}_PATH": "/usr/bin:/bin" for kind in ("executorEnv", "yarn_appMasterEnv")}
    bare |= {f"spark_{kind}_PYTHONPATH": "" for kind in ("executorEnv", "yarn_appMasterEnv")}
    environment = cluster.client_environment(spark_driver_memoryOverhead="1g", **bare)
    environment |= {"MEMORY_OVERHEAD": "1g", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    late = threading.Timer(LATE_SECONDS, cluster.start_node, ("late", 4096))
    late.start()
    try:
        done = subprocess.run(
            [str(ROOT / "deploy" / "yarn" / "train.sh"), "job.yaml"],
            env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=500,
        )  # fmt: skip
    finally:
        late.join()
    assert done.returncode == 0, done.stderr[-3000:] + cluster.read_containers()[-6000:]
    assert list((cluster.folder / "containers" / "late").rglob("stdout")), "no worker ran on the late node"
    assert storage.list_names(f"{uri}/model")
