"""Batch sizes by epoch and scaled learning rates in the stages."""

import logging
from pathlib import Path
from typing import Any

import pytest
from parity import assert_equal_weights
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.tuning import ParamGridBuilder

from ringspark.estimators import ScaleLearningRate, TorchRegressor
from ringspark.estimators.stages.to_config import settings_without_effect
from ringspark.extras.tuning import batch_that_fits
from ringspark.extras.tuning.short_training import plain_copy
from ringspark.models import ModelSpec
from ringspark.pipelines import write_shards

pytestmark = pytest.mark.spark

LINE = ModelSpec("linear", {"in_features": 2, "out_features": 1})
SCALING = ScaleLearningRate(base_batch_size=8, warmup_epochs=0.5)
PAIRS = [[2, 32], [4, 64]]


SETTINGS: dict[str, Any] = {"model": LINE, "epochs": 4, "batchSize": 16, "scaleLearningRate": SCALING}
SETTINGS |= {"batchSizeSchedule": {4: 64, 2: 32}}


def regressor(**params: Any) -> TorchRegressor:
    fixed = {"optimizer": "sgd", "learningRate": 0.004, "collective": "torch", "reader": "arrow"}
    return TorchRegressor(**SETTINGS | params, **fixed, showProgress=False)


def test_the_params_are_kept_in_one_form(spark: Any, tmp_path: Path) -> None:
    estimator = regressor()
    assert estimator.getBatchSizeSchedule() == PAIRS
    assert estimator.getScaleLearningRate() == SCALING
    # JSON of a job has no numbers as keys.
    assert regressor(batchSizeSchedule={"2": 32, "4": 64}).getBatchSizeSchedule() == PAIRS
    estimator.save(str(tmp_path / "stage"))
    loaded = TorchRegressor.load(str(tmp_path / "stage"))
    Pipeline(stages=[loaded]).save(str(tmp_path / "pipeline"))
    (again,) = Pipeline.load(str(tmp_path / "pipeline")).getStages()
    for stage in (loaded, again, again.copy()):
        assert (stage.getBatchSizeSchedule(), stage.getScaleLearningRate()) == (PAIRS, SCALING)
    grid = ParamGridBuilder().addGrid(estimator.batchSizeSchedule, [{3: 48}, [[2, 24]]])
    grid.addGrid(estimator.scaleLearningRate, [None, {"rule": "sqrt", "baseBatchSize": 4}])
    found = [estimator.copy(values) for values in grid.build()]
    assert [stage.getBatchSizeSchedule() for stage in found] == [[[3, 48]]] * 2 + [[[2, 24]]] * 2
    scaled = ScaleLearningRate(base_batch_size=4, rule="sqrt")
    assert [stage.getScaleLearningRate() for stage in found] == [None, scaled] * 2
    assert estimator.getBatchSizeSchedule() == PAIRS
    cleared = estimator.setBatchSizeSchedule(None).setScaleLearningRate(None)
    assert (cleared.getBatchSizeSchedule(), cleared.getScaleLearningRate()) == ([], None)


def test_what_changes_nothing_is_said(spark: Any) -> None:
    def said(**params: Any) -> list[str]:
        return list(settings_without_effect(regressor(**params), on_shards=False))

    assert said() == []
    idle = {"rule": "linear", "baseBatchSize": 16}
    assert said(scaleLearningRate=idle) == []
    assert said(scaleLearningRate=idle, batchSizeSchedule=None) == [
        "scaleLearningRate has no effect: batchSize is its base_batch_size in every epoch"
    ]
    assert said(epochs=1) == ["batchSizeSchedule has no effect: it begins after the last epoch"]
    assert said(epochs=3) == ["batchSizeSchedule has 64 rows from epoch 4 on, but there are only 3 epochs"]


def test_short_trainings_have_one_batch_size_and_the_rate_that_they_are_given(spark: Any) -> None:
    plain = plain_copy(regressor())
    assert (plain.getBatchSizeSchedule(), plain.getScaleLearningRate()) == ([], None)


@pytest.mark.slow
def test_two_workers_train_as_one_and_say_what_they_do(spark: Any, tmp_path: Path, caplog: Any) -> None:
    features = "CAST(array(sin(id), cos(id)) AS array<float>) AS features"
    rows = spark.range(0, 100, 1, 2).selectExpr(features, "sin(id + 1) AS label")
    uri = str(tmp_path / "shards")
    write_shards(rows, uri)
    models = []
    for workers in (1, 2):
        with caplog.at_level(logging.INFO, "ringspark"):
            estimator = regressor(numWorkers=workers, storageUri=str(tmp_path), cache="memory")
            models.append(estimator.fitOnShards(uri))
        assert (
            "learning rates are scaled (linear from a batch of 8): times 2 from epoch 1 on (batches of 16), "
            "4 from epoch 2 on (batches of 32), 8 from epoch 4 on (batches of 64), after a rise from 1 over "
            "4 steps"
        ) in caplog.text
        caplog.clear()
    history = models[1].summary.history
    assert list(history["batch_size"]) == [16, 32, 32, 64]
    assert list(history["steps"]) == [7, 4, 4, 2]
    assert list(history["learning_rate"]) == pytest.approx([0.008, 0.016, 0.016, 0.032])
    assert_equal_weights(*models, 1e-6)
    PipelineModel([models[1]]).save(str(tmp_path / "model"))
    assert PipelineModel.load(str(tmp_path / "model")).transform(rows).count() == 100


@pytest.mark.slow
def test_a_batch_that_fits_is_the_largest(spark: Any, tmp_path: Path) -> None:
    rows = spark.range(0, 300, 1, 2).selectExpr("array(sin(id), cos(id)) AS features", "cos(id) AS label")
    # 64 rows of some kilobytes each.
    wide = ModelSpec("mlp", {"in_features": 2, "hidden": [256] * 8, "out_features": 1})
    estimator = regressor(model=wide, storageUri=str(tmp_path))
    whole = batch_that_fits(estimator, rows)
    assert (whole.gradient_accumulation, whole.rows) == (1, 64)
    assert str(whole) == (
        "micro-batches of 64 rows per worker fit: batchSize=16, and up to 64 by batchSizeSchedule, with "
        "gradientAccumulation=1"
    )
    assert whole.estimator.getBatchSizeSchedule() == PAIRS
    # The number of micro-batches is at most the rows of the smallest batch.
    with pytest.raises(ValueError, match=r"the smallest micro-batch, of 4 rows on a worker, does not fit"):
        batch_that_fits(estimator, rows, budget=1)
