"""Counts, amounts and offsets in a table: the statistics of the label, metrics, saved models and offsets."""

import math
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import sklearn.metrics as sk
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from pyspark.sql import functions as F

from ringspark.estimators import TorchClassifier, TorchRegressionModel, TorchRegressor
from ringspark.extras.tables.label import look_at_label
from ringspark.models import ModelSpec

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("interpreter")]

ROWS = 300
SMALL: dict[str, Any] = {"rates": [1.0, 0.5], "width": 8, "depth": 1, "number_width": 2}
PACK = ModelSpec("tabpack", {"dropouts": [0.0, 0.2], **SMALL})
TABM = ModelSpec("tabm", {"members": 2, "width": 8, "depth": 1, "number_width": 2})
FAST: dict[str, Any] = {"showProgress": False, "collective": "torch", "labelCol": "count"}


@pytest.fixture(scope="module")
def table(spark: Any) -> Any:
    rng = np.random.default_rng(0)
    rows = []
    for row in range(ROWS):
        x, exposure = float(rng.normal()), float(rng.uniform(0.1, 4))
        count = int(rng.poisson(exposure * math.exp(0.8 * x - 4)) if row else 1)
        rows.append((row, x, "abc"[row % 3], math.log(exposure), count, count > 0, 1.0 + row % 2))
    schema = "row int, x double, word string, offset double, count int, any boolean, weight double"
    return spark.createDataFrame(rows, schema).repartition(2, "row").cache()


def predictions(model: Any, rows: Any) -> Any:
    return np.array([row.prediction for row in model.transform(rows).orderBy("row").collect()])


@pytest.fixture(scope="module")
def model(table: Any) -> Any:
    estimator = TorchRegressor(
        **FAST, model=PACK, epochs=30, loss="poisson", offsetCol="offset", weightCol="weight", numWorkers=2
    )
    return estimator.fit(table.drop("any", "row"))


@pytest.mark.modes
def test_counts_of_a_table_have_positive_means_that_the_offset_multiplies(model: Any, table: Any) -> None:
    assert "offset" not in set(model.summary.columns["column"])
    found = predictions(model, table)
    counts = [row["count"] for row in table.orderBy("row").select("count").collect()]
    assert (found > 0).all()
    expected = sk.mean_poisson_deviance(counts, found)
    assert model.evaluate(table)["poisson_deviance"] == pytest.approx(expected, rel=1e-6)
    # Better than one rate for all rows.
    exposure = np.exp([row["offset"] for row in table.orderBy("row").select("offset").collect()])
    assert expected < sk.mean_poisson_deviance(counts, exposure * np.sum(counts) / exposure.sum())
    doubled = table.withColumn("offset", F.col("offset") + math.log(2))
    np.testing.assert_allclose(predictions(model, doubled), 2 * found, rtol=1e-5)
    assert "validation_poisson_deviance" in model.summary.history.columns


@pytest.mark.telling
@pytest.mark.filterwarnings("ignore")  # MLflow's libraries warn about each other's next versions
def test_a_saved_model_and_a_later_fit_keep_the_link(model: Any, table: Any, tmp_path: Path) -> None:
    found = predictions(model, table)
    model.save(str(tmp_path / "model"))
    loaded = TorchRegressionModel.load(str(tmp_path / "model"))
    np.testing.assert_array_equal(predictions(loaded, table), found)
    model.export(str(tmp_path / "served"), format="mlflow")
    served = mlflow.pyfunc.load_model(str(tmp_path / "served"))
    rows = table.orderBy("row").select("x", "word", "offset").toPandas()
    np.testing.assert_allclose(served.predict(rows)["prediction"], found, rtol=1e-5)
    later = TorchRegressor(**FAST, loss="poisson", initialModel=loaded, epochs=1, learningRate=1e-9)
    again = later.fit(table.drop("any", "row"))
    assert again.getOffsetCol() == "offset"
    doubled = table.withColumn("offset", F.col("offset") + math.log(2))
    np.testing.assert_allclose(predictions(again, doubled), 2 * predictions(again, table), rtol=1e-5)
    with pytest.raises(ValueError, match=r"loss 'auto' needs another network than this .*; set the loss"):
        TorchRegressor(**FAST, initialModel=loaded).fit(table.drop("any", "row"))


@pytest.mark.slow
def test_two_workers_train_and_choose_the_members_of_one(table: Any) -> None:
    still = ModelSpec("tabpack", {"dropouts": [0.0, 0.0], "unknown": 0.0, **SMALL})
    given = FAST | {"model": still, "epochs": 3, "loss": "tweedie_1.4", "offsetCol": "offset"}
    rows = table.drop("any", "row")
    one, two = (
        TorchRegressor(**given, weightCol="weight", numWorkers=workers).fit(rows) for workers in (1, 2)
    )
    np.testing.assert_allclose(predictions(two, table), predictions(one, table), rtol=1e-3)
    shares = [model.module().state_dict()["shares"].tolist() for model in (one, two)]
    assert shares[1] == pytest.approx(shares[0])


@pytest.mark.parametrize(("loss", "shift"), [("gamma", 1.0), ("tweedie_1.2", 0.0)])
def test_a_constant_network_predicts_the_mean(table: Any, loss: str, shift: float) -> None:
    # Of noise alone, the best prediction is the label's mean, in the label's unit.
    rows = table.withColumn("count", (F.col("count") + shift) * 1e-6).select("row", "word", "count")
    model = TorchRegressor(**FAST, model=TABM, epochs=3, loss=loss, inputCols=["word"]).fit(rows)
    mean = rows.agg(F.avg("count")).head()[0]
    assert predictions(model, rows).mean() == pytest.approx(mean, rel=0.3)


def test_statistics_of_the_label_skip_rows_without_label_or_offset(spark: Any) -> None:
    rows = [(2.0, 0.0), (None, 10.0), (50.0, None), (50.0, math.nan)]
    frame = spark.createDataFrame(rows, "label double, offset double")
    for loss, center in (("poisson", math.log(2)), ("mse", 2.0)):
        found = look_at_label(frame, F.lit(False), frame.schema["label"], "regression", loss, "offset")[1]
        assert found["center"] == pytest.approx(center)


def test_a_label_that_float32_cannot_tell_from_its_offset_is_reported(spark: Any) -> None:
    def look(label: float, offset: float) -> None:
        frame = spark.createDataFrame([(label, offset), (label + 1, offset)], "label double, offset double")
        look_at_label(frame, F.lit(False), frame.schema["label"], "regression", "mse", "offset")

    with pytest.warns(UserWarning, match="differs from offsetCol 'offset' by only 0.5"):
        look(1e9, 1e9)
    with pytest.raises(ValueError, match="label 'label' has values up to 1e\\+39"):
        look(1e39, 1e39)
    with pytest.raises(ValueError, match="offsetCol 'offset' has infinite values"):
        look(1.0, -math.inf)


@pytest.mark.telling
def test_folds_share_a_plan_per_loss(table: Any) -> None:
    estimator = TorchRegressor(**FAST, model=TABM, epochs=1, offsetCol="offset", inputCols=["x", "word"])
    grid = ParamGridBuilder().addGrid(estimator.loss, ["poisson", "mse_per_member"]).build()
    evaluator = RegressionEvaluator(labelCol="count")
    found = CrossValidator(
        estimator=estimator, estimatorParamMaps=grid, evaluator=evaluator, numFolds=2, collectSubModels=True
    ).fit(table)
    counted, squared = found.subModels[0]
    doubled = table.withColumn("offset", F.col("offset") + math.log(2))
    np.testing.assert_allclose(predictions(counted, doubled), 2 * predictions(counted, table), rtol=1e-5)
    np.testing.assert_allclose(
        predictions(squared, doubled), predictions(squared, table) + math.log(2), atol=1e-5
    )


def test_the_offset_of_classes_is_added_to_each_members_logit(table: Any) -> None:
    estimator = TorchClassifier(
        **FAST | {"labelCol": "any"}, model=PACK, epochs=1, offsetCol="offset", inputCols=["x", "word"]
    )
    model = estimator.fit(table)
    assert "validation_temperature" not in model.summary.history.columns
    sure = model.transform(table.withColumn("offset", F.lit(30.0))).agg(F.min("prediction")).head()[0]
    never = model.transform(table.withColumn("offset", F.lit(-30.0))).agg(F.max("prediction")).head()[0]
    assert (sure, never) == (1.0, 0.0)
