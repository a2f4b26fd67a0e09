"""Records of a training on a real MLflow server, and a server that is killed during a training."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from acting_callback import Acts
from failing_callback import Fails
from mlflow_server import MlflowServer, mlflow_server
from parity import assert_equal_weights
from pyspark.ml.functions import array_to_vector
from pyspark.sql import functions as F
from waiting import wait_for

from ringspark.estimators import TorchClassifier, TrainingState, WorkerError
from ringspark.models import ModelSpec

mlflow = pytest.importorskip("mlflow")

# MLflow's libraries warn about each other's next versions.
pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

STEP_METRICS = {"step/train_loss", "step/learning_rate"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as found:
        yield found


@pytest.fixture(scope="module")
def table(spark: Any) -> Any:
    plain = spark.range(0, 96, 1, 2).selectExpr("sin(id) as a", "cos(1.7 * id) as b")
    features = array_to_vector(F.array("a", "b")).alias("features")
    return plain.select(features, F.expr("cast(a + b > 0 as double) as label"))


def classifier(folder: Path, **params: Any) -> TorchClassifier:
    network = ModelSpec("mlp", {"in_features": 2, "hidden": [8], "out_features": 2})
    sizes = {"epochs": 2, "batchSize": 32, "numWorkers": 2, "logEverySteps": 1, "showProgress": False}
    return TorchClassifier(model=network, storageUri=str(folder), **sizes | params)


def runs_of(client: Any, experiment: str) -> list[Any]:
    found = client.get_experiment_by_name(experiment)
    return [] if found is None else list(client.search_runs([found.experiment_id]))


def test_a_server_holds_all_of_a_fit_in_one_run(server: MlflowServer, table: Any, tmp_path: Path) -> None:
    client = mlflow.MlflowClient(tracking_uri=server.uri)
    options = {"tracking_uri": server.uri, "experiment": "all", "registered_model_name": "main.flights.late"}
    tracking = [{"name": "mlflow", **options}]
    model = classifier(
        tmp_path, tracking=tracking, callbacks=[Acts(step_end=lambda state: state.log("own", state.rank))]
    ).fit(table)

    (run,) = runs_of(client, "all")  # two ranks, one run
    run_id = run.info.run_id
    assert run.info.status == "FINISHED"
    params = run.data.params
    assert (params["epochs"], params["numWorkers"], params["data.rows"]) == ("2", "2", "96")
    assert run.data.tags["ringspark.stage"] == model.uid
    records = model.summary.epochs

    def logged(name: str) -> dict[int, float]:
        return {metric.step: metric.value for metric in client.get_metric_history(run_id, name)}

    for name in ("train_loss", "learning_rate", "rows_per_second", "bytes_sent", "flops"):
        assert logged(name) == dict(zip([3, 6], model.summary.history[name], strict=True))
    for rank in range(2):
        assert logged(f"own_rank{rank}") == {3: rank, 6: rank}
    for name in STEP_METRICS:
        assert list(logged(name)) == [1, 2, 3, 4, 5, 6]
    # All steps have equally many rows, so the mean over steps is the epoch's loss.
    losses = list(logged("step/train_loss").values())
    assert sum(losses[:3]) / 3 == pytest.approx(records[0].train_loss, rel=1e-6)
    assert {file.path for file in client.list_artifacts(run_id)} == {"config.json", "history.json"}
    (data,) = run.inputs.dataset_inputs
    assert json.loads(data.dataset.profile)["num_rows"] == 96

    version = client.get_model_version("main.flights.late", "1")
    assert version.run_id == run_id
    mlflow.set_tracking_uri(server.uri)
    try:
        served = mlflow.pyfunc.load_model("models:/main.flights.late/1")
    finally:
        mlflow.set_tracking_uri(None)
    assert [column.name for column in served.metadata.signature.inputs.inputs] == ["features"]
    assert "prediction" in [column.name for column in served.metadata.signature.outputs.inputs]
    assert len(served.predict(served.input_example)) == 2
    rows = pd.DataFrame({"features": [row["features"].toArray() for row in table.collect()]})
    expected = [row["prediction"] for row in model.transform(table).collect()]
    assert served.predict(rows)["prediction"].tolist() == expected


def test_a_resumed_training_goes_on_in_its_run(server: MlflowServer, table: Any, tmp_path: Path) -> None:
    client = mlflow.MlflowClient(tracking_uri=server.uri)
    options = {"tracking_uri": server.uri, "experiment": "resumed", "log_model": False}
    run = {"runUri": str(tmp_path / "run"), "maxRestarts": 0, "checkpointEverySteps": 1}
    tracking = {"tracking": [{"name": "mlflow", **options}]}
    stage = classifier(tmp_path, epochs=4, callbacks=[Fails(tmp_path / "failed", step=9)], **run, **tracking)
    with pytest.raises(WorkerError, match="step 9"):
        stage.fit(table)
    (failed,) = runs_of(client, "resumed")
    assert failed.info.status == "FAILED"
    assert "step 9" in failed.data.tags["ringspark.error"]
    stage.setResume(True).fit(table)
    (run,) = runs_of(client, "resumed")
    assert (run.info.run_id, run.info.status) == (failed.info.run_id, "FINISHED")
    history = client.get_metric_history(run.info.run_id, "step/train_loss")
    assert [metric.step for metric in history] == list(range(1, 13))
    epochs = client.get_metric_history(run.info.run_id, "train_loss")
    assert [metric.step for metric in epochs] == [3, 6, 9, 12]


def test_a_killed_server_changes_no_number(table: Any, tmp_path: Path, caplog: Any, monkeypatch: Any) -> None:
    # Otherwise MLflow retries a request to the dead server for minutes.
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    dead = tmp_path / "dead"

    def wait(state: TrainingState) -> None:
        if state.epoch == 2:
            wait_for(str(dead), dead.exists)

    held = [Acts(epoch_end=wait)]
    with mlflow_server(tmp_path / "server") as server:
        client = mlflow.MlflowClient(tracking_uri=server.uri)

        def metrics() -> list[Any]:
            return [run.data.metrics for run in runs_of(client, "k")]

        def kill(event: dict[str, Any]) -> None:
            if event["event"] == "epoch" and event["epoch"] == 1:
                wait_for("epoch 1 in MLflow", lambda: any("train_loss" in m for m in metrics()))
                server.kill()
                dead.touch()

        tracking = [{"name": "mlflow", "tracking_uri": server.uri, "experiment": "k"}, kill]
        with caplog.at_level(logging.WARNING, "ringspark"):
            tracked = classifier(tmp_path, epochs=4, callbacks=held, tracking=tracking).fit(table)
    (record,) = [record for record in caplog.records if "MLflow" in record.getMessage()]
    assert f"MLflow at {server.uri} accepts no data" in record.getMessage()
    assert "the training continues" in record.getMessage()
    plain = classifier(tmp_path, epochs=4, callbacks=held).fit(table)
    assert [r.train_loss for r in tracked.summary.epochs] == [r.train_loss for r in plain.summary.epochs]
    assert_equal_weights(tracked, plain)
    # Values logged before the server's death remain.
    (run,) = runs_of(mlflow.MlflowClient(tracking_uri=server.database), "k")
    assert run.info.status == "RUNNING"
    assert "train_loss" in run.data.metrics
