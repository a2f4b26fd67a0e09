"""`removeRun` removes the run that made the model, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest
from spark_tables import waves

from ringspark.estimators import TorchRegressionModel, TorchRegressor
from ringspark.models import ModelSpec

pytestmark = pytest.mark.spark


def fit(spark: Any, folder: Path, **params: Any) -> Any:
    network = ModelSpec("mlp", {"in_features": 2, "hidden": [2], "out_features": 1})
    settings = {"batchSize": 16, "runUri": str(folder / "run"), "showProgress": False}
    return TorchRegressor(model=network, **settings, **params).fit(waves(spark, 32))


def test_only_the_run_that_made_the_model_is_removed(spark: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = fit(spark, tmp_path, keepTrainingState=True)
    first.save(str(run / "model"))
    (run / "logs").mkdir(exist_ok=True)
    (run / "logs" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"kept, because it holds '(model/.*|logs/notes.txt)', which ring"):
        first.removeRun()
    assert TorchRegressionModel.load(str(run / "model")).summary.steps == 2
    (run / "logs" / "notes.txt").unlink()
    (run / "model").rename(tmp_path / "model")
    # A newer training in the same folder.
    newer = fit(spark, tmp_path, keepTrainingState=True, resume=True, epochs=2)
    with pytest.raises(ValueError, match=r"no 'result.json' in it shows that this run or job made it"):
        first.removeRun()
    newer.save(str(tmp_path / "newer"))
    loaded = TorchRegressionModel.load(str(tmp_path / "newer"))
    loaded.removeRun()
    assert not run.exists()
    assert loaded.transform(waves(spark, 32)).count() == 32


def test_a_folder_that_a_saved_model_names_is_not_removed(spark: Any, tmp_path: Path) -> None:
    fit(spark, tmp_path).save(str(tmp_path / "model"))
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("")
    described = json.loads((tmp_path / "model" / "ringspark.json").read_text())
    described["summary"]["run_uri"] = str(home)
    (tmp_path / "model" / "ringspark.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match=r"no 'result.json' in it shows that this run or job made it"):
        TorchRegressionModel.load(str(tmp_path / "model")).removeRun()
    assert (home / "thesis.tex").exists()
