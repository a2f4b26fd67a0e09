"""`ringspark score` with a model that a fit has registered under an alias."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from command_line import run_ringspark

from ringspark.estimators import TorchRegressor
from ringspark.models import ModelSpec

mlflow = pytest.importorskip("mlflow")

# MLflow's libraries warn about each other's next versions.
pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.filterwarnings("ignore")]


def test_an_alias_names_the_model_that_scores(spark: Any, tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = mlflow.MlflowClient(tracking_uri=uri)
    client.create_experiment("e", artifact_location=(tmp_path / "artifacts").as_uri())
    rows = spark.range(32).selectExpr("array(id / 32) as features", "id / 32 as label")
    rows.write.parquet(str(tmp_path / "rows"))
    table = spark.read.parquet(str(tmp_path / "rows"))
    options = {"tracking_uri": uri, "experiment": "e", "registered_model_name": "m", "alias": "champion"}
    network = ModelSpec("linear", {"in_features": 1, "out_features": 1})
    settings = {"storageUri": str(tmp_path / "runs"), "tracking": [{"name": "mlflow", **options}]}
    first, second = (TorchRegressor(model=network, seed=seed, **settings).fit(table) for seed in (1, 2))
    assert int(client.get_model_version_by_alias("m", "champion").version) == 2
    client.set_registered_model_alias("m", "before", "1")

    def score(model: str, *options: str) -> subprocess.CompletedProcess[str]:
        places = ["--parquet", str(tmp_path / "rows"), "--output", str(tmp_path / "out"), "--overwrite"]
        return run_ringspark("score", "--model", model, *options, *places, MLFLOW_TRACKING_URI=uri)

    other = tmp_path / "out.model"
    other.mkdir()  # of the user
    for model, alias in ((second, "champion"), (first, "before")):
        done = score(f"models:/m@{alias}")
        assert done.returncode == 0, done.stderr
        found = spark.read.parquet(str(tmp_path / "out")).orderBy("label").collect()
        wanted = model.transform(table).orderBy("label").collect()
        assert [row.prediction for row in found] == [row.prediction for row in wanted]
    assert score("models:/m@champion", "--columns", "absent").returncode == 2
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out", "out.model"]
    typo = score("models:/m@chmpion")
    assert typo.returncode == 2
    assert "MLflow cannot give models:/m@chmpion" in typo.stderr
    assert "models:/name@alias" in typo.stderr
