"""Fits on executor pods: killed, late, too few, and with dynamic allocation."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from command_line import run_ringspark
from fake_kubernetes import FakeKubernetes
from waiting import wait_for

pytestmark = pytest.mark.slow

_PROGRAM = """
import json, pathlib, sys, time
from pyspark.sql import SparkSession
from ringspark.estimators import TorchRegressor
from ringspark.estimators.training.callbacks import Callback
from ringspark.models import ModelSpec

class Waits(Callback):
    # Rank 1 waits at a step until the test has killed a pod.
    def __init__(self, mark):
        self.mark = pathlib.Path(mark)

    def on_step_end(self, state):
        if (state.rank, state.step) == (1, 15) and not self.mark.exists():
            self.mark.touch()
            while self.mark.read_text() != "killed":
                time.sleep(0.05)

master, storage, kills, conf = sys.argv[1:]
builder = SparkSession.builder.master(master)
for key, value in json.loads(conf).items():
    builder = builder.config(key, value)
spark = builder.getOrCreate()
rows = spark.range(200).selectExpr("array(id / 200, id % 7 / 7) AS features", "double(id % 7) AS label")
stage = TorchRegressor(
    model=ModelSpec("mlp", {"in_features": 2, "hidden": [8], "out_features": 1}), numWorkers=2, epochs=3,
    batchSize=20, storageUri=storage, showProgress=False, reader="arrow", seed=3, maxRestarts=1,
    checkpointEverySteps=5, timeoutSeconds=float(spark.conf.get("spark.test.seconds", "90")),
    callbacks=[Waits(f"{storage}.mark")] if kills else [],
)
try:
    model = stage.fit(rows)
except ValueError as error:
    print(json.dumps(str(error)))
else:
    assert model.transform(rows).count() == 200
    print(json.dumps([record.train_loss for record in model.summary.epochs]))
spark.stop()
"""
_CONF = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.executor.instances": "2",
    "spark.executor.cores": "1",
    "spark.executor.memory": "600m",
    "spark.kubernetes.container.image": "none",
    "spark.kubernetes.executor.apiPollingInterval": "1s",
    "spark.kubernetes.executor.enableApiWatcher": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
_DYNAMIC = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.minExecutors": "0",
    "spark.dynamicAllocation.maxExecutors": "2",
}


@contextmanager
def _started(
    master: str, folder: Path, kills: bool = False, python: str = sys.executable, **conf: str
) -> Iterator[subprocess.Popen[str]]:
    variables = {"PYSPARK_PYTHON": python, "SPARK_LOCAL_IP": "127.0.0.1"}
    arguments = [master, str(folder / "storage"), "kills" if kills else "", json.dumps(_CONF | conf)]
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, *arguments],
        env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _answer(process: "subprocess.Popen[str]") -> Any:
    output, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors[-3000:]
    return json.loads(output.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Losses of the same fit on a local master."""
    with _started("local[2]", tmp_path_factory.mktemp("calm")) as process:
        return _answer(process)


def test_a_killed_pod_changes_no_loss(tmp_path: Path, calm: Any) -> None:
    mark = tmp_path / "storage.mark"
    with FakeKubernetes(tmp_path / "pods") as cluster, _started(cluster.master, tmp_path, True) as process:
        wait_for("step 15", mark.exists, seconds=300)
        cluster.kill(cluster.running[-1])
        mark.write_text("killed")
        assert _answer(process) == calm
        assert len(cluster.processes) == 3
        assert not cluster.objects  # Spark removed its pods and configmaps


@pytest.mark.parametrize("conf", [{}, _DYNAMIC], ids=["static", "dynamic"])
def test_a_fit_waits_for_late_pods(tmp_path: Path, calm: Any, conf: dict[str, str]) -> None:
    """Spark starts without executors after 30 s."""
    with (
        FakeKubernetes(tmp_path / "pods", pending_seconds=20.0 if conf else 45.0) as cluster,
        _started(cluster.master, tmp_path, **conf) as process,
    ):
        assert _answer(process) == calm


def test_pods_that_never_come_are_named(tmp_path: Path) -> None:
    with (
        FakeKubernetes(tmp_path / "pods", room=1) as cluster,
        _started(cluster.master, tmp_path, **{"spark.test.seconds": "30"}) as process,
    ):
        assert _answer(process).startswith(
            "numWorkers (2) must not exceed the 1 task slots of the cluster (k8s"
        )


def test_a_packed_environment_trains_on_bare_pods(tmp_path: Path, packed: Path, calm: Any) -> None:
    """In client mode."""
    conf, python = {"spark.archives": f"{packed}#environment"}, "./environment/bin/python"
    with (
        FakeKubernetes(tmp_path / "pods", is_bare=True) as cluster,
        _started(cluster.master, tmp_path, python=python, **conf) as process,
    ):
        assert _answer(process) == calm


def test_the_check_of_a_cluster_trains_on_pods(tmp_path: Path) -> None:
    conf = "".join(f"{key} {value}\n" for key, value in _CONF.items())
    (tmp_path / "spark-defaults.conf").write_text(conf)
    variables = {
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_CONF_DIR": str(tmp_path),
    }
    with FakeKubernetes(tmp_path / "pods") as cluster:
        place = ("--master", cluster.master, "--storage-uri", str(tmp_path / "storage"))
        done = run_ringspark("check", *place, **variables)
    print(done.stdout)
    assert done.stdout.endswith("ready to train\n"), done.stdout + done.stderr[-2000:]
