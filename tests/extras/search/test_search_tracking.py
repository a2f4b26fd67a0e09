"""A search's trials in MLflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ringspark.estimators import TorchRegressor
from ringspark.extras.search import OptunaSearch, Uniform
from ringspark.models import ModelSpec

pytest.importorskip("optuna")

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.mark.filterwarnings("ignore")  # MLflow's libraries warn about each other's next versions
def test_trials_are_runs_below_the_run_that_was_active_at_fit(spark: Any, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.create_experiment("e", artifact_location=(tmp_path / "artifacts").as_uri())
    search = OptunaSearch(
        estimator=TorchRegressor(
            model=ModelSpec("mlp", {"in_features": 1, "hidden": [], "out_features": 1}),
            featuresCol="x",
            labelCol="y",
            storageUri=str(tmp_path / "store"),
            showProgress=False,
            tracking=[{"name": "mlflow", "tracking_uri": uri, "log_model": False}],
        ),
        space={"learningRate": Uniform(0.01, 0.1)},
        numTrials=2,
        parallelism=2,
        pruner="none",
    )
    frame = spark.range(64).selectExpr("array(cast(id as float)) as x", "cast(id % 3 as double) as y")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(uri)
    try:
        with mlflow.start_run(experiment_id=experiment) as parent:
            model = search.fit(frame)
    finally:
        mlflow.set_tracking_uri(before)
    runs = [run for run in client.search_runs([experiment]) if run.info.run_id != parent.info.run_id]
    assert [run.data.tags["mlflow.parentRunId"] for run in runs] == [parent.info.run_id] * 2
    rates = {float(run.data.params["learningRate"]) for run in runs}
    assert rates == set(model.trials["learningRate"])
