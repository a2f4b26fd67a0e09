"""Passwords in URIs never appear in messages or files."""

import base64
import logging
import secrets
from pathlib import Path

import pytest

from ringspark.estimators import TorchRegressor, WorkerError
from ringspark.estimators.stages.declared import plain_values
from ringspark.estimators.tracking.base import RunStart
from ringspark.estimators.tracking.jsonl import JsonLinesTracker
from ringspark.estimators.tracking.watcher import RunWatcher
from ringspark.models import ModelSpec

GANG_KEY = bytes(range(180, 212))
SPEC = ModelSpec("linear", {"in_features": 2, "out_features": 1})
URI = "s3://KEY:hunter2@bucket/runs"


def files_with_it(folder: Path) -> list[str]:
    return [str(p) for p in folder.rglob("*") if p.is_file() and b"hunter2" in p.read_bytes()]


@pytest.mark.parametrize("name", ["storageUri", "runUri"])
def test_a_param_refuses_a_uri_with_a_password(name, caplog):
    caplog.set_level(logging.DEBUG)
    setter = f"set{name[0].upper()}{name[1:]}"
    for give in (
        lambda: TorchRegressor(model=SPEC, **{name: URI}),
        lambda: getattr(TorchRegressor(model=SPEC), setter)(URI),
    ):
        with pytest.raises(ValueError, match="must not hold a password or token") as caught:
            give()
        assert "hunter2" not in str(caught.value)
    assert "hunter2" not in caplog.text


def test_a_copy_and_a_saved_stage_hold_no_password(tmp_path):
    estimator = TorchRegressor(model=SPEC, featuresCol="x", labelCol="y", storageUri="s3://bucket/runs")
    with pytest.raises(ValueError, match="must not hold a password or token"):
        estimator.copy({estimator.storageUri: URI})
    with pytest.raises(ValueError, match="must not hold a password or token") as caught:
        estimator.save(URI)
    assert "hunter2" not in str(caught.value)
    estimator.save(str(tmp_path / "stage"))
    assert files_with_it(tmp_path) == []


@pytest.mark.extras
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"tracking_uri": "https://user:hunter2@host"},
            r"tracking_uri .* got 'https://\*\*\*:\*\*\*@host'; set MLFLOW_TRACKING_USERNAME",
        ),
        (
            {"registry_uri": "postgresql://host/db?password=hunter2"},
            "registry_uri .*; leave it out and set MLFLOW",
        ),
        ({"tags": {"source": "from s3://KEY:hunter2@bucket/rows"}}, "tags .*; set it in the environment"),
    ],
)
def test_trackers_refuse_a_password(options, told):
    from ringspark.extras.tracking.mlflow_tracker import MlflowTracker

    for tracker in ({"name": "mlflow", **options}, MlflowTracker(**options)):
        with pytest.raises(ValueError, match=f"tracking: {told}") as caught:
            TorchRegressor(tracking=["jsonl", tracker])
        assert "hunter2" not in str(caught.value)


def test_no_tracker_gets_a_password_in_settings_or_errors(tmp_path):
    uri = "https://user:hunter2@host/weights"
    settings = plain_values(TorchRegressor(model=ModelSpec("linear", {"weights": [uri]})))
    run = RunStart(name="stage", run_uri=str(tmp_path), settings=settings)
    with pytest.raises(OSError, match="hunter2"), RunWatcher(run, [JsonLinesTracker()]):
        raise OSError(f"cannot read '{uri}' now")
    text = (tmp_path / "tracking" / "events.jsonl").read_text()
    assert text.count("https://***:***@host/weights") == 2
    assert "cannot read 'https://***:***@host/weights' now" in text
    assert files_with_it(tmp_path) == []


@pytest.mark.spark
def test_a_whole_fit_leaves_the_gangs_key_nowhere(spark, tmp_path, monkeypatch, caplog, capfd):
    monkeypatch.setattr(secrets, "token_bytes", lambda size: GANG_KEY[:size])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    caplog.set_level(logging.DEBUG, logger="ringspark")
    table = spark.range(96).selectExpr("array(sin(id), cos(id)) as features", "sin(2 * id) as label")
    estimator = TorchRegressor(
        model=SPEC, numWorkers=2, epochs=2, batchSize=16, runUri=str(tmp_path / "run"), checkpointEverySteps=2
    )
    model = estimator.fit(table)
    model.save(str(tmp_path / "model"))
    # The failed run: its message and its files.
    other = estimator.copy({estimator.runUri: str(tmp_path / "failed"), estimator.learningRate: 1e30})
    with pytest.raises(WorkerError) as caught:
        other.fit(table)
    told = capfd.readouterr()
    files = {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert any("/run/" in name for name in files)
    texts = [told.out, told.err, caplog.text, str(caught.value), repr(model), str(model.summary)]
    places = [*files.values(), *(text.encode() for text in texts)]
    forms = [GANG_KEY, GANG_KEY.hex().encode(), base64.b64encode(GANG_KEY), repr(GANG_KEY).encode()]
    for secret in [*forms, b"hunter2"]:
        assert not [place[:200] for place in places if secret in place]
