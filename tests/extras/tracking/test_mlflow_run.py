"""MLflow runs whose store refuses some writes, on an SQLite database in this process."""

import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from small_training import epoch_record

from ringspark.estimators.tracking.base import RunEnd, RunStart
from ringspark.extras.tracking.mlflow_run import MlflowRun
from ringspark.extras.tracking.mlflow_tracker import MlflowTracker

mlflow = pytest.importorskip("mlflow")

# MLflow's dependencies warn about each other's next versions.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def client(tmp_path: Path) -> Any:
    found = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    found.create_experiment("e", artifact_location=(tmp_path / "artifacts").as_uri())
    return found


@pytest.fixture
def both_insert() -> Iterator[None]:
    """Makes two threads look up a data set's record before either thread inserts it."""
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    barrier = Barrier(2)

    def meet(*args: Any) -> None:
        if args[2].startswith("INSERT INTO datasets"):
            barrier.wait(60)

    event.listen(Engine, "before_cursor_execute", meet)
    yield
    event.remove(Engine, "before_cursor_execute", meet)


def _follow(client: Any, folder: Path) -> None:
    """Runs the tracker through a whole training."""
    tracker = MlflowTracker(tracking_uri=client.tracking_uri, experiment="e", log_model=False)
    data = {"rows": 96, "validation_rows": 0, "shards_uri": "/shards"}
    run = MlflowRun(tracker, RunStart(name=folder.name, run_uri=str(folder), data=data))
    run.epoch(epoch_record(train_loss=0.5))
    run.end(RunEnd(status="finished"))


def _runs(client: Any) -> list[Any]:
    return list(client.search_runs([client.get_experiment_by_name("e").experiment_id]))


def test_two_trials_of_one_data_set_are_two_whole_runs(
    client: Any, both_insert: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: _follow(client, tmp_path / name), ["first", "second"]))
    assert "MLflow" not in caplog.text
    for run in _runs(client):
        assert run.info.status == "FINISHED"
        assert run.data.metrics["train_loss"] == 0.5
        assert [entry.dataset.name for entry in run.inputs.dataset_inputs] == ["shards"]


@pytest.mark.parametrize(("table", "metrics"), [("datasets", {"train_loss": 0.5}), ("metrics", {})])
def test_a_store_that_refuses_a_part_has_a_run_that_ended(
    client: Any, tmp_path: Path, table: str, metrics: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    refuses = f"CREATE TRIGGER no BEFORE INSERT ON {table} BEGIN SELECT RAISE(ABORT, 'disk quota'); END"
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        database.execute(refuses)
    _follow(client, tmp_path / "run")
    assert len([record for record in caplog.records if "MLflow" in record.message]) == 1
    (run,) = _runs(client)
    assert run.info.status == "FINISHED"
    assert metrics.items() <= run.data.metrics.items()
