"""A training that starts with the workers that there are, and continues with more."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from small_training import columns_of
from waiting import wait_for

from ringspark.estimators import TorchRegressor
from ringspark.estimators.launch.owner import read_owner
from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.models import ModelSpec


class Diary(Callback):
    """Writes number of ranks and step of each step of rank 0; a rank alone waits for the driver's request."""

    def __init__(self, path: str, run_uri: str) -> None:
        self._path, self._run_uri = path, run_uri

    def on_step_end(self, state: TrainingState) -> None:
        if state.rank == 0:
            with open(self._path, "a") as file:
                file.write(f"{state.size} {state.step}\n")
        if state.size == 1 and self._run_uri:
            time.sleep(0.05)
            if state.step == 100:
                wait_for("the request", lambda: getattr(read_owner(self._run_uri), "regroups", False))
                time.sleep(6.0)  # rank 0 looks for it every five seconds


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("launch", [pytest.param("tasks", marks=pytest.mark.telling), "barrier"])
def test_a_training_goes_on_with_more_workers_at_a_checkpoint(
    spark: Any, make_shards: Any, tmp_path: Path, launch: str
) -> None:
    manifest, diary = make_shards(columns_of(96, 3)), tmp_path / "diary"

    def fit(run_uri: str, **more: Any) -> Any:
        model = ModelSpec("mlp", {"in_features": 3, "hidden": [8], "out_features": 1})
        settings = {"model": model, "epochs": 60, "batchSize": 16, "seed": 3, "collective": "torch"}
        settings |= {"showProgress": False, "reader": "arrow", "inputCols": ["x"], "labelCol": "y"}
        callbacks = [Diary(str(diary), run_uri)]
        return TorchRegressor(**settings, callbacks=callbacks, **more).fitOnShards(manifest.uri)

    run_uri = str(tmp_path / "run")
    grown = fit(run_uri, runUri=run_uri, numWorkers=1, maxWorkers=2, launch=launch)
    sizes = [tuple(map(int, line.split())) for line in diary.read_text().splitlines()]
    steps = [step for _, step in sizes]
    # No step is missing, repeated or out of order: all workers ended at the checkpoint.
    assert steps == list(range(1, 361))
    first = [size for size, _ in sizes].index(2)
    assert [size for size, _ in sizes] == [1] * first + [2] * (360 - first)
    assert grown.summary.resumed_steps == (first,)
    assert (grown.summary.restart_reasons, grown.summary.preemption_reasons) == ((), ())
    alone = fit("", storageUri=str(tmp_path / "storage"), numWorkers=1).module().state_dict()
    for name, value in grown.module().state_dict().items():
        torch.testing.assert_close(value, alone[name], rtol=0, atol=1e-6)
