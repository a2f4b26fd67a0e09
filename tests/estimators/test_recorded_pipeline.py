"""A Pipeline and a PipelineModel saved by an earlier version load with the same Params.

tests/recorded/pipeline holds them. They predate the present package layout, so the module paths of public
stages, their Params and the file formats must stay valid.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pyspark.ml import Pipeline, PipelineModel

from ringspark.estimators import TorchClassificationModel
from ringspark.estimators.stages.persistence import DESCRIPTION

RECORD = Path(__file__).resolve().parents[1] / "recorded" / "pipeline"
# These defaults depend on the installed packages.
BY_INSTALLATION = {"collective", "reader"}


@pytest.fixture(autouse=True)
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allows pickled code: one stage holds an `nn.Module`."""
    monkeypatch.setenv("RINGSPARK_ALLOW_PICKLE", "1")


@pytest.mark.spark
@pytest.mark.usefixtures("spark_saves")
def test_an_old_pipeline_model_predicts_what_it_predicted(spark: Any) -> None:
    expected = json.loads((RECORD / "scored.json").read_text())
    rows = spark.createDataFrame(
        [(row["a"], row["b"], row["c"]) for row in expected], "a double, b double, c double"
    )
    scored = PipelineModel.load(str(RECORD / "fitted")).transform(rows).collect()
    assert len(scored) == len(expected) > 0
    for row, before in zip(scored, expected, strict=True):
        assert row.prediction == before["prediction"]
        assert list(row.probability) == pytest.approx(before["probability"], abs=1e-6)
        assert row.estimate == pytest.approx(before["estimate"], rel=1e-5, abs=1e-6)
        assert row.guess == pytest.approx(before["guess"], rel=1e-5, abs=1e-6)


@pytest.mark.spark
@pytest.mark.usefixtures("spark_saves")
def test_an_old_pipeline_keeps_its_params(spark: Any) -> None:
    expected = json.loads((RECORD / "params.json").read_text())
    stages = Pipeline.load(str(RECORD / "unfitted")).getStages()[3:]
    assert [type(stage).__name__ for stage in stages] == sorted(
        expected, key=["TorchClassifier", "TorchRegressor", "TorchEstimator"].index
    )
    for stage in stages:
        loaded = {param.name: value for param, value in stage.extractParamMap().items()}
        for name, value in expected[type(stage).__name__].items():
            if name in BY_INSTALLATION and not stage.isSet(stage.getParam(name)):
                continue
            plain = isinstance(value, bool | int | float | list) or not str(value).startswith("<")
            assert name in loaded
            assert not plain or loaded[name] == value, name


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_a_model_of_before_a_summary_told_of_restarts_loads(tmp_path: Path) -> None:
    shutil.copytree(RECORD / "fitted" / "stages", tmp_path / "stages")
    (model,) = (tmp_path / "stages").glob("*_TorchClassifier_*")
    description = json.loads((model / DESCRIPTION).read_text())
    for name in ("restart_reasons", "resumed_steps", "checkpoint_errors", "non_finite"):
        del description["summary"][name]
    for epoch in description["summary"]["epochs"]:
        del epoch["skipped_steps"]
    (model / DESCRIPTION).write_text(json.dumps(description))
    summary = TorchClassificationModel.load(str(model)).summary
    assert (summary.restarts, summary.skipped_steps, summary.non_finite) == (0, 0, ())
