"""MLflow and TensorBoard logs of one training, read back with their own libraries."""

import json
import sys
import types
from pathlib import Path
from typing import get_args

import pandas as pd
import pytest
from pyspark.ml.functions import array_to_vector
from pyspark.sql import functions as F
from small_networks import mlp
from small_training import epoch_record
from spark_tables import quiet

from ringspark.estimators import TorchClassifier
from ringspark.estimators.tracking.base import RunEnd, RunStart
from ringspark.estimators.tracking.console import ConsoleTracker, PlainLines
from ringspark.estimators.tracking.registry import TRACKERS, make_trackers
from ringspark.estimators.training.history import EpochRecord, TrainingProgress
from ringspark.estimators.training.settings.choices import TrackerName
from ringspark.estimators.training.step_log import StepRecord
from ringspark.pipelines import storage


def _record(step: int, loss: float) -> StepRecord:
    return StepRecord(
        step=step, epoch=1, rows=32 * step, seconds=0.1 * step, train_loss=loss, learning_rate=0.1
    )


def _epoch(number: int, loss: float) -> EpochRecord:
    return epoch_record(number, steps=3, train_loss=loss)


def _scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {
        tag: [(event.step, round(event.value, 5)) for event in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


@pytest.mark.extras
def test_each_listed_name_is_a_tracker_that_a_setting_may_name():
    assert set(TRACKERS) == set(get_args(TrackerName))
    for name, tracker in TRACKERS.items():
        assert tracker.name == name


@pytest.mark.extras
@pytest.mark.parametrize("name", TRACKERS)
def test_a_mistyped_option_is_one_sentence(name):
    with pytest.raises(ValueError, match=f"tracking: '{name}' has no option 'lgo_dir'"):
        make_trackers([{"name": name, "lgo_dir": "x"}], shows_progress=False)


@pytest.mark.parametrize("content", ["export PATH=/bin\n", '{"version": 1}\n', "\0\n"])
def test_lines_are_not_appended_to_a_file_of_another_program(tmp_path, content):
    file = tmp_path / "settings"
    file.write_text(content)
    options = [{"name": "jsonl", "path": str(file)}]
    with pytest.raises(ValueError, match="is a file of another program; give a new file"):
        make_trackers(options, shows_progress=False)
    for ours in ("", '{"run": "a", "event": "start"}\n'):
        file.write_text(ours)
        make_trackers(options, shows_progress=False)


def test_a_notebook_shows_a_bar(monkeypatch, capsys):
    run = RunStart(name="r", run_uri="u")
    assert isinstance(ConsoleTracker().start(run), PlainLines)
    # IPython's kernel keeps its shell there; its standard error is no terminal.
    shell = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    listener = ConsoleTracker().start(run)
    listener.progress(TrainingProgress(epoch=1, epochs=2, step=3, num_steps=10, rows=30, seconds=0.1))
    listener.end(RunEnd(status="failed"))
    assert "3/10" in capsys.readouterr().err


@pytest.mark.extras
def test_tensorboard_shows_each_step_once_after_a_rollback_and_a_restart(tmp_path):
    (tracker,) = make_trackers(["tensorboard"], shows_progress=False)
    folder = tmp_path / "tracking" / "tensorboard"
    start = RunStart(name="stage", run_uri=str(tmp_path), settings={"epochs": 2})
    first = tracker.start(start)
    first.steps([_record(1, 0.5), _record(2, 0.4)])
    # A rollback repeats step 2 and gets another loss.
    first.steps([_record(2, 0.3), _record(3, 0.2)])
    first.epoch(_epoch(1, 0.35))
    first._writer.flush()
    assert _scalars(folder)["step/train_loss"] == [(1, 0.5), (2, 0.3), (3, 0.2)]
    first._writer.close()
    again = tracker.start(start)
    again.steps([_record(1, 0.5), _record(2, 0.3), _record(3, 0.2)])
    again.epoch(_epoch(1, 0.35))
    again.epoch(_epoch(2, 0.1))
    again._writer.close()
    found = _scalars(folder)
    assert found["step/train_loss"] == [(1, 0.5), (2, 0.3), (3, 0.2)]
    assert found["epoch/train_loss"] == [(3, 0.35), (6, 0.1)]


@pytest.mark.extras
def test_tensorboard_keeps_runs_of_one_name_apart_in_one_log_dir(tmp_path):
    (tracker,) = make_trackers([{"name": "tensorboard", "log_dir": str(tmp_path)}], shows_progress=False)
    for search, loss in (("first", 0.5), ("second", 0.4), ("first", 0.3)):
        # The third start resumes the first run and replaces only the first run's events.
        events = tracker.start(RunStart(name="stage", run_uri=f"/searches/{search}/trials/0"))
        events.steps([_record(1, loss)])
        events._writer.close()
    found = sorted(_scalars(folder)["step/train_loss"] for folder in tmp_path.iterdir())
    assert found == [[(1, 0.3)], [(1, 0.4)]]


@pytest.mark.extras
@pytest.mark.parametrize(("name", "folder"), [("jsonl", "tracking"), ("tensorboard", "tracking/tensorboard")])
def test_a_file_in_a_store_is_written_again_when_it_has_grown_by_a_tenth(name, folder):
    (tracker,) = make_trackers([name], shows_progress=False)
    listener = tracker.start(RunStart(name="stage", run_uri=f"memory://long-{name}"))
    fs, place = storage.filesystem(f"memory://long-{name}/{folder}")
    writes, sizes = set(), []
    for number in range(1, 201):
        listener.epoch(_epoch(number, 0.5))
        (file,) = fs.ls(place)
        writes.add(fs.modified(file["name"]))
        sizes.append(file["size"])
    listener.end(RunEnd(status="finished"))
    assert len(writes) < 60
    (file,) = fs.ls(place)
    assert sizes[-1] > file["size"] / 1.2, "a reader is less than a tenth behind"
    if name == "jsonl":
        events = [json.loads(line)["event"] for line in fs.cat_file(file["name"]).splitlines()]
        assert events == ["start", *["epoch"] * 200, "end"]


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # MLflow's libraries warn about each other's next versions
def test_one_fit_is_told_to_mlflow_and_tensorboard(spark, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    frame = spark.range(0, 96, 1, 2).select(
        array_to_vector(F.array(F.sin("id"), F.cos(1.7 * F.col("id")))).alias("features"),
        F.expr("cast(sin(id) + cos(1.7 * id) > 0 as double) as label"),
    )
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    options = {"tracking_uri": uri, "experiment": "e", "registered_model_name": "m", "tags": {"mine": "1"}}
    run_uri = tmp_path / "run"
    client = mlflow.MlflowClient(tracking_uri=uri)
    client.create_experiment("e", artifact_location=(tmp_path / "artifacts").as_uri())
    tracking = [{"name": "mlflow", **options}, "tensorboard"]
    settings = {"model": mlp(2), "epochs": 2, "batchSize": 32, "logEverySteps": 1, "tracking": tracking}
    model = quiet(TorchClassifier, tmp_path, runUri=str(run_uri), **settings).fit(frame)

    (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["epochs"] == "2"
    assert run.data.params["data.rows"] == "96"
    assert run.data.tags["mine"] == "1"
    losses = [record.train_loss for record in model.summary.epochs]
    history = client.get_metric_history(run.info.run_id, "train_loss")
    assert [(metric.step, metric.value) for metric in history] == [(3, losses[0]), (6, losses[1])]
    steps = client.get_metric_history(run.info.run_id, "step/train_loss")
    assert [metric.step for metric in steps] == [1, 2, 3, 4, 5, 6]
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {"config.json", "history.json"}
    shown = _scalars(run_uri / "tracking" / "tensorboard")
    assert shown["epoch/train_loss"] == [(3, round(losses[0], 5)), (6, round(losses[1], 5))]
    assert [step for step, _ in shown["epoch/rows_per_second"]] == [3, 6]

    version = client.get_model_version("m", "1")
    served = mlflow.pyfunc.load_model(version.source)
    rows = frame.collect()
    table = pd.DataFrame({"features": [row["features"].toArray() for row in rows]})
    expected = [row["prediction"] for row in model.transform(frame).collect()]
    assert served.predict(table)["prediction"].tolist() == expected
