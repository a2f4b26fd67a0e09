"""`fit` with `quantiles` and `intervals`: columns, corrections, saved and served models, tuners."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from parity import assert_equal_weights
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from pyspark.sql import functions as F
from read_page import Page
from spark_tables import quiet
from without_ringspark import predict_without, same

from ringspark.estimators import TorchRegressionModel, TorchRegressor
from ringspark.extras.quantiles.conformal import calibrate
from ringspark.extras.search import OptunaSearch, Uniform
from ringspark.extras.serving.served_model import ServedModel
from ringspark.models import ModelSpec

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("ignore:left out of the table:UserWarning")]

SMALL = {"rates": [1.0, 1.0], "dropouts": [0.0, 0.0], "width": 8, "depth": 1, "unknown": 0.0}
LEVELS = [0.1, 0.5, 0.9]


@pytest.fixture(scope="module")
def table(spark: Any) -> Any:
    rng = np.random.default_rng(0)
    x, noise = rng.normal(size=900), rng.normal(size=900)
    site = rng.choice(["calm", "wild", "rare", ""], 900, p=[0.5, 0.4, 0.02, 0.08])
    label = 10 * x + noise * np.where(site == "wild", 5.0, 1.0)
    frame = pd.DataFrame(
        {"id": np.arange(900), "x": x, "site": site, "label": label, "held": rng.random(900) < 0.4}
    )
    schema = "id long, x double, site string, label double, held boolean"
    return spark.createDataFrame(frame, schema).replace("", None, "site").repartition(3, "id").cache()


def estimator(folder: Path, **params: Any) -> TorchRegressor:
    own: dict[str, Any] = {"model": ModelSpec("tabpack", SMALL), "inputCols": ["x"], "epochs": 3}
    own |= {"learningRate": 0.02, "batchSize": 64, "validationIndicatorCol": "held", "collective": "torch"}
    return quiet(TorchRegressor, folder, **own | params)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantiles")


@pytest.fixture(scope="module")
def model(table: Any, folder: Path) -> TorchRegressionModel:
    return estimator(folder, quantiles=LEVELS, intervals=0.8, intervalGroupCol="site").fit(table)


def scores(frame: Any, model: Any, group: str | None = None) -> Any:
    """Returns the sorted conformal scores of the held-out rows, from the quantiles of `transform`."""
    rows = model.transform(frame.where("held")).toPandas()
    rows = rows if group is None else rows[rows.site == group]
    ends = np.array([vector.toArray() for vector in rows.quantiles])
    return np.sort(np.maximum(ends[:, 0] - rows.label, rows.label - ends[:, 2]))


@pytest.mark.modes
def test_transform_adds_quantiles_and_intervals(table: Any, model: Any) -> None:
    given = table.drop("label")
    found = model.transform(given)
    assert found.columns == [*given.columns, "prediction", "quantiles", "interval"]
    assert [(f.name, f.dataType) for f in found.schema] == [
        (f.name, f.dataType) for f in model.transformSchema(given.schema)
    ]
    rows = found.orderBy("id").collect()
    quantiles = np.array([row.quantiles.toArray() for row in rows])
    assert (np.diff(quantiles, axis=1) >= 0).all()
    assert quantiles[:, 1].tolist() == [row.prediction for row in rows]
    corrections = model.getIntervalCorrections()
    own = [corrections["groups"].get(row.site, corrections["all"]) for row in rows]
    assert [row.interval.lower for row in rows] == pytest.approx(quantiles[:, 0] - own)
    assert [row.interval.upper for row in rows] == pytest.approx(quantiles[:, 2] + own)
    # A group that held-out rows did not have gets the common correction.
    (new,) = model.transform(given.limit(1).withColumn("site", F.lit("new"))).collect()
    assert new.interval.upper == pytest.approx(new.quantiles[2] + corrections["all"])


def test_corrections_are_scores_of_the_conformal_rank(table: Any, model: Any) -> None:
    corrections = model.getIntervalCorrections()
    # A group of few rows has no correction of its own; nulls are no group.
    assert set(corrections["groups"]) == {"calm", "wild"}
    for group, found in [(None, corrections["all"]), *corrections["groups"].items()]:
        known = scores(table, model, group)
        assert found == pytest.approx(known[math.ceil((len(known) + 1) * 0.8) - 1], abs=1e-5)
    assert corrections["groups"]["wild"] > corrections["groups"]["calm"]


def test_held_out_rows_without_a_label_do_not_count(table: Any, model: Any) -> None:
    is_known = F.col("id") % 4 > 0
    labels = (F.when(is_known, F.col("label")).otherwise(F.lit(missing)) for missing in (None, math.nan))
    frames = [table.where(is_known), *(table.withColumn("label", label) for label in labels)]
    first, *others = (calibrate(model, frame, "held") for frame in frames)
    assert others == [first, first]


def test_evaluate_returns_loss_and_coverage_of_the_quantiles(table: Any, model: Any) -> None:
    sk = pytest.importorskip("sklearn.metrics")
    rows = model.transform(table).toPandas()
    ends = np.array([vector.toArray() for vector in rows.quantiles])
    found = model.copy({model.metrics: ["pinball_loss", "coverage", "rmse"]}).evaluate(table)
    assert found == pytest.approx(
        {
            "pinball_loss": np.mean(
                [sk.mean_pinball_loss(rows.label, ends[:, i], alpha=a) for i, a in enumerate(LEVELS)]
            ),
            "coverage": np.mean((ends[:, 0] <= rows.label) & (rows.label <= ends[:, 2])),
            "rmse": math.sqrt(np.mean((rows.prediction - rows.label) ** 2)),
        }
    )
    assert set(model.evaluate(table)) == {"pinball_loss", "coverage"}
    record = model.summary.epochs[0]
    assert record.metrics["validation_pinball_loss"] == pytest.approx(record.validation_loss)


def test_ranks_change_neither_weights_nor_corrections(table: Any, folder: Path) -> None:
    one, two = (
        estimator(folder, quantiles=LEVELS, intervals=0.8, intervalGroupCol="site", numWorkers=n).fit(table)
        for n in (1, 2)
    )
    assert_equal_weights(one, two, 1e-5)
    first, second = one.getIntervalCorrections(), two.getIntervalCorrections()
    assert first["all"] == pytest.approx(second["all"], abs=1e-4)
    assert first["groups"] == pytest.approx(second["groups"], abs=1e-4)


def test_without_quantiles_the_interval_is_around_the_prediction(table: Any, folder: Path) -> None:
    model = estimator(folder, model=ModelSpec("tabm", {"members": 2, "width": 8}), intervals=0.5).fit(table)
    rows = model.transform(table).where("held").toPandas()
    width = model.getIntervalCorrections()["all"]
    known = np.sort((rows.prediction - rows.label).abs())
    assert width == pytest.approx(known[math.ceil((len(rows) + 1) * 0.5) - 1], abs=1e-5)
    assert [each["upper"] for each in rows.interval] == pytest.approx(rows.prediction + width)
    bare = model.copy({model.intervalCol: ""})
    assert bare.transform(table).columns == [*table.columns, "prediction"]
    kept = model.copy({model.handleInvalid: "keep"}).transform(
        table.withColumn("x", F.lit(None).cast("double"))
    )
    assert kept.where("interval IS NULL").count() in (0, 900)


def test_saved_stages_predict_the_same(table: Any, model: Any, folder: Path) -> None:
    expected = model.transform(table).orderBy("id").select("quantiles", "interval").collect()
    path = str(folder / "pipeline")
    PipelineModel([model]).write().overwrite().save(path)
    (loaded,) = PipelineModel.load(path).stages
    assert loaded.transform(table).orderBy("id").select("quantiles", "interval").collect() == expected
    assert loaded.getIntervalCorrections() == model.getIntervalCorrections()
    fitted = estimator(folder, quantiles=tuple(LEVELS), intervals=0.8)
    fitted.write().overwrite().save(str(folder / "estimator"))
    assert TorchRegressor.load(str(folder / "estimator")).getQuantiles() == LEVELS


@pytest.mark.telling
def test_tuners_choose_by_the_prediction(table: Any, folder: Path) -> None:
    stage = estimator(folder, intervals=0.8, epochs=1)
    grid = ParamGridBuilder().addGrid(stage.quantiles, [LEVELS, [0.5]]).build()
    tuner = CrossValidator(
        estimator=Pipeline(stages=[stage]),
        estimatorParamMaps=grid,
        evaluator=RegressionEvaluator(),
        numFolds=2,
    )
    best = tuner.fit(table).bestModel.stages[0]
    row = best.transform(table).first()
    assert len(row.quantiles) == len(best.getQuantiles())
    assert row.interval.lower <= row.prediction <= row.interval.upper


@pytest.mark.telling
def test_a_model_is_served_with_the_common_correction_alone(table: Any, model: Any, folder: Path) -> None:
    rows = [{"x": value} for value in (0.5, None, -3.0)]
    with pytest.raises(ValueError, match="clear it by setIntervalGroupCol"):
        ServedModel(model).predict(pd.DataFrame(rows))
    with pytest.raises(ValueError, match="take format='mlflow'"):
        model.export(str(folder / "network.pt2"))
    common = model.copy().setIntervalGroupCol(None)
    spark = table.sparkSession
    wanted = [
        {
            "prediction": row.prediction,
            "quantiles": row.quantiles.toArray().tolist(),
            "interval.lower": row.interval.lower,
            "interval.upper": row.interval.upper,
        }
        for row in common.transform(
            spark.createDataFrame(pd.DataFrame(rows), "x double").coalesce(1)
        ).collect()
    ]
    same(ServedModel(common).predict(pd.DataFrame(rows)).to_dict("records"), wanted)
    pytest.importorskip("mlflow")
    with pytest.warns():  # MLflow's libraries warn about each other's next versions
        common.export(str(folder / "served"), format="mlflow")
    same(predict_without(folder / "served", rows, "torch"), wanted)


@pytest.mark.slow
def test_a_report_compares_the_prediction(table: Any, model: Any, folder: Path) -> None:
    model.report(str(folder / "page.html"), table)
    cards = Page((folder / "page.html").read_text()).cards
    for name in ("rmse", "mae"):
        expected = RegressionEvaluator(metricName=name).evaluate(model.transform(table))
        assert float(cards[name.upper()]) == pytest.approx(expected, abs=2e-3)


@pytest.mark.slow
def test_the_best_model_of_a_search_has_corrections(table: Any, folder: Path) -> None:
    pytest.importorskip("optuna")
    stage = estimator(folder, intervals=0.8, epochs=1)
    search = OptunaSearch(
        estimator=stage, space={"learningRate": Uniform(0.01, 0.02)}, numTrials=1, pruner="none"
    )
    best = search.fit(table).bestModel
    rows = best.transform(table).where("held").toPandas()
    known = np.sort((rows.prediction - rows.label).abs())
    rank = math.ceil((len(rows) + 1) * 0.8) - 1
    assert best.getIntervalCorrections()["all"] == pytest.approx(known[rank], abs=1e-5)
