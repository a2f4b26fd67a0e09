"""Fits on a standalone cluster with dynamic allocation, from no executor on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from standalone import spark_environment, standalone_cluster

_PROGRAM = """
import json, os, pathlib, signal, sys
from pyspark.sql import SparkSession
from ringspark.estimators import TorchRegressor
from ringspark.estimators.training.callbacks import Callback
from ringspark.models import ModelSpec

class Kills(Callback):
    # Kills the process of rank 1, or the executor around it, at a step.

    def __init__(self, mark, is_executor):
        self.mark, self.is_executor = pathlib.Path(mark), is_executor

    def on_step_end(self, state):
        if (state.rank, state.step) != (1, 15) or self.mark.exists():
            return
        self.mark.touch()
        daemon = pathlib.Path(f"/proc/{os.getppid()}/status").read_text()
        executor = int(daemon.split("PPid:")[1].split()[0])
        os.kill(executor if self.is_executor else os.getpid(), signal.SIGKILL)

url, mode, storage, *names = sys.argv[1:]
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
network = ModelSpec("mlp", {"in_features": 2, "hidden": [8], "out_features": 1})
fits = {"torch": {}, "horovod": {"collective": "horovod"}}
for name in ("executor", "process"):
    callbacks = [Kills(f"{storage}-{name}", name == "executor")]
    fits[name] = {"callbacks": callbacks, "maxRestarts": 1, "checkpointEverySteps": 5}
found = {}
for name in names:
    fit = TorchRegressor(
        model=network, numWorkers=2, epochs=2, batchSize=20, storageUri=storage, showProgress=False,
        reader="arrow", seed=3, **{"collective": "torch", **fits[name]},
    )
    model = fit.fit(rows)
    summary = model.summary
    losses = [record.train_loss for record in summary.epochs]
    found[name] = losses, len(summary.restart_reasons), len(summary.preemption_reasons)
    assert model.transform(rows).count() == 200
print(json.dumps(found))
"""


def _start(url: str, mode: str, folder: Path, *names: str) -> subprocess.Popen[str]:
    """Starts the fits of these names in an application of their own."""
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, url, mode, str(folder / "storage"), *names],
        env=spark_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def _results(started: subprocess.Popen[str]) -> dict[str, list[Any]]:
    """Returns losses, number of restarts and number of preemptions of each fit."""
    try:
        output, errors = started.communicate(timeout=560)
    finally:
        started.kill()
    assert started.returncode == 0, errors[-3000:]
    found: dict[str, list[Any]] = json.loads(output.strip().splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["classic", "connect"])
def test_a_fit_starts_from_no_executor_and_survives_the_loss_of_one(tmp_path: Path, mode: str) -> None:
    """Spark refuses a barrier stage here, so the workers are ordinary tasks."""
    pytest.importorskip("horovod")
    with standalone_cluster(tmp_path) as url:
        found = _results(_start(url, mode, tmp_path, "torch", "horovod", "executor", "process"))
    for losses, _, _ in found.values():
        assert losses == pytest.approx(found["torch"][0], rel=1e-5)
    # An executor that is taken away costs no restart, and a process that dies by itself does.
    counts = {name: tuple(rest) for name, (_, *rest) in found.items()}
    assert counts == {"torch": (0, 0), "horovod": (0, 0), "executor": (0, 1), "process": (1, 0)}


@pytest.mark.slow
def test_two_fits_share_slots_for_one_and_a_half(tmp_path: Path) -> None:
    """Each application gets a slot that the other one needs, until one of them gives its slots back."""
    with standalone_cluster(tmp_path, cores=(1, 2)) as url:
        both = [_start(url, "classic", tmp_path, "torch") for _ in range(2)]
        one, other = (_results(each) for each in both)
    assert one == other
    assert one["torch"][1:] == [0, 0]
