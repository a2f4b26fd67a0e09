"""`fit` with local SGD and asynchronous training, on Spark from shards on disk.

A gang without Spark repeats each training from its stored config. Deterministic methods must be bitwise
equal; the other methods must take the same steps and learn equally well.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.sql import functions as F
from short_sync import sync_of
from small_training import train_ranks, weights_of
from spark_tables import on_this_host, points, values_of

from ringspark.estimators import ParameterServer, TorchRegressionModel, TorchRegressor
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.models import ModelSpec
from ringspark.pipelines import write_shards

pytestmark = [pytest.mark.spark, pytest.mark.distributed, on_this_host]

ROWS, HELD_OUT, BATCH, EPOCHS = 230, 37, 32, 4
STEPS = -(-(ROWS - HELD_OUT) // BATCH)  # per epoch; the last batch has one row, so one worker has none
SPEC = ModelSpec("mlp", {"in_features": 3, "hidden": [8], "out_features": 1, "dropout": 0.1})

STREAMING = {"steps": 4, "fragments": 2, "delay": 1, "alpha": 0.5}
LOCAL: dict[str, Any] = {
    "average": 3,
    "one-shot": "training",
    "streaming": {"name": "diloco", **STREAMING, "outerMomentum": 0.5, "send": "int8"},
    "elastic": {"name": "elastic", "steps": 2},
}
APART: dict[str, Any] = {
    "ssp": {"name": "ssp", "staleness": 2, "correction": "staleness"},
    "asp": "asp",
    "hogwild": "hogwild",
}
WAYS: list[tuple[str, dict[str, Any]]] = [(n, {"sync": sync_of(local=way)}) for n, way in LOCAL.items()]
WAYS += [(name, {"sync": sync_of(apart=value)}) for name, value in APART.items()]
BOUNDED = {"maxGradNorm": 0.5, "weightDecay": 0.01, "emaDecay": 0.5}
WAYS += [("ssp of 0, bounded", {"sync": ParameterServer(staleness=0), **BOUNDED})]
ORDERED = {*LOCAL, "ssp of 0, bounded"}  # a rerun is bitwise equal
FAST = {"ssp"}


@pytest.fixture(scope="module")
def table(spark: Any) -> Any:
    return points(spark, ROWS).withColumn("held", F.expr("id % 6 = 0 AND id < 222"))


@pytest.fixture(scope="module")
def shards(table: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    uri = str(tmp_path_factory.mktemp("data") / "shards")
    return write_shards(table, uri, num_files=2, validation_col="held").uri


@pytest.mark.parametrize(
    ("name", "settings"),
    [pytest.param(*way, id=way[0], marks=[] if way[0] in FAST else [pytest.mark.slow]) for way in WAYS],
)
def test_a_fit_of_workers_that_run_apart(
    table: Any, shards: str, tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    run = tmp_path / "run"
    sizes = {"epochs": EPOCHS, "batchSize": BATCH, "optimizer": "momentum", "learningRate": 0.01}
    gang = {"numWorkers": 2, "collective": "torch", "runUri": str(run), "showProgress": False}
    estimator = TorchRegressor(model=SPEC, metrics=["mae"], **sizes, **gang, **settings)
    model = estimator.fitOnShards(shards)

    summary = model.summary
    assert (summary.steps, summary.rows) == (EPOCHS * STEPS, EPOCHS * (ROWS - HELD_OUT))
    assert (summary.model_epoch, summary.restarts, summary.stop_reason) == (EPOCHS, 0, None)
    assert summary.resumed_steps == summary.checkpoint_errors == summary.non_finite == ()
    assert summary.run_uri == str(run)
    history = summary.history
    assert history["epoch"].tolist() == [1, 2, 3, 4]
    assert history["steps"].tolist() == [STEPS] * EPOCHS
    assert history["rows"].tolist() == [ROWS - HELD_OUT] * EPOCHS
    assert history["learning_rate"].tolist() == [0.01] * EPOCHS
    assert history["train_loss"].iloc[-1] < history["train_loss"].iloc[0]

    # The validation loss belongs to the final model.
    weights = torch.cat([p.detach().flatten() for p in model.module().parameters()])
    rows = model.transform(table).orderBy("id").collect()
    with torch.no_grad():
        outputs = model.module()(torch.tensor([row.features for row in rows], dtype=torch.float32))[:, 0]
    np.testing.assert_allclose([row.prediction for row in rows], outputs, rtol=1e-5, atol=1e-6)
    errors = [row.prediction - row.label for row in rows if row.held]
    assert len(errors) == HELD_OUT
    assert np.mean(np.square(errors)) == pytest.approx(history["validation_loss"].iloc[-1], rel=1e-4)
    assert np.mean(np.abs(errors)) == pytest.approx(history["validation_mae"].iloc[-1], rel=1e-4)

    model.write().overwrite().save(str(tmp_path / "saved"))
    loaded = TorchRegressionModel.load(str(tmp_path / "saved"))
    assert loaded.summary == summary
    assert values_of(loaded.transform(table)) == [row.prediction for row in rows]

    config = TrainConfig.from_json((run / "config.json").read_text())
    results = train_ranks(replace(config, run_uri=str(tmp_path / "without-spark")))
    assert [epoch.epoch for epoch in results[0].history] == history["epoch"].tolist()
    assert (results[0].steps, results[0].rows) == (summary.steps, summary.rows)
    for key in ("train_loss", "validation_loss", "metrics"):
        values = [[getattr(epoch, key) for epoch in result.history] for result in results]
        assert values[0] == values[1], "the workers have different histories"
        if name in ORDERED:
            assert values[0] == [getattr(epoch, key) for epoch in summary.epochs]
    if name in ORDERED:
        assert torch.equal(weights_of(results[0], SPEC.build()), weights)
    else:
        # The order of updates varies between runs, but the result of a smooth problem does not.
        assert results[0].history[-1].train_loss < results[0].history[0].train_loss
    # In any order, each step pushes and reads the same amount.
    assert results[0].bytes_sent == summary.bytes_sent
