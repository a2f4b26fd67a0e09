"""`summary.report` and `model.report`: a fitted model's page, with and without held-out rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

from pyspark.ml.evaluation import MulticlassClassificationEvaluator, RegressionEvaluator
from pyspark.ml.feature import VectorAssembler
from pyspark.sql import functions as F
from read_page import Page

from ringspark.estimators import TorchClassificationModel, TorchClassifier, TorchRegressor
from ringspark.extras.report.content import show
from ringspark.models import ModelSpec
from ringspark.pipelines import storage

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ROWS = 600
EVIL = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    """`copy` equals the label, `noise` has no information, and `city` is the class as a string."""
    drawn = np.random.default_rng(0)
    label = drawn.integers(0, 2, ROWS)
    noise = drawn.normal(size=ROWS).tolist()
    rows = [(float(y), n, float(2 * y), "ab"[y], int(y)) for y, n in zip(label, noise, strict=True)]
    schema = f"`{EVIL}` double, noise double, amount double, city string, number int"
    assembler = VectorAssembler(inputCols=[EVIL, "noise"], outputCol="features")
    return assembler.transform(spark.createDataFrame(rows, schema)).cache()


def _spec(outputs: int) -> ModelSpec:
    return ModelSpec("mlp", {"in_features": 2, "hidden": [8], "out_features": outputs})


@pytest.fixture(scope="module")
def classifier(frame: Any) -> Any:
    """A model with little training, so that it has some errors."""
    settings = {"epochs": 2, "learningRate": 0.02, "batchSize": 64}
    return TorchClassifier(model=_spec(2), labelCol="city", **settings).fit(frame)


def _page(reporter: Any, folder: Path, *data: Any, **settings: Any) -> Page:
    reporter.report(folder / "page.html", *data, **settings)
    return Page.at(folder / "page.html")


def test_the_page_of_a_summary_has_its_numbers_without_the_folder(classifier: Any, tmp_path: Path) -> None:
    summary = classifier.summary
    page = _page(summary, tmp_path)
    told = page.tables["curves"][0]
    assert told.column("train_loss") == [show(loss) for loss in summary.history["train_loss"]]
    assert page.cards["rows seen"] == f"{summary.rows:,}"
    assert {"settings", "data", "environment"} <= set(page.tables)
    classifier.write().save(str(tmp_path / "model"))
    # The run's folder is on another machine or deleted.
    loaded = TorchClassificationModel.load(str(tmp_path / "model"))
    object.__setattr__(loaded.summary, "run_uri", str(tmp_path / "gone"))
    again = _page(loaded.summary, tmp_path)
    assert again.tables["curves"][0].rows == told.rows
    assert "the run's folder is not readable" in again.text["headline"]
    assert again.cards["state"] == "finished"


def test_held_out_rows_give_the_counts_of_spark(classifier: Any, frame: Any, tmp_path: Path) -> None:
    page = _page(classifier, tmp_path, frame, seed=1)
    scored = classifier.transform(frame).select("number", "prediction", "probability").toPandas()
    accuracy = (scored.number == scored.prediction).mean()
    assert page.cards["held-out rows"] == f"{ROWS:,}"
    assert page.cards["accuracy"] == f"{accuracy:.4f}"
    told = page.text["classes"]
    for name, number in (("a", 0), ("b", 1)):
        count = int(((scored.number == number) & (scored.prediction == number)).sum())
        assert f"{count:,}" in told, name
    evaluator = MulticlassClassificationEvaluator(labelCol="number", metricName="logLoss")
    as_double = frame.withColumn("number", frame.number.cast("double"))
    assert page.cards["log loss"] == show(evaluator.evaluate(classifier.transform(as_double)))
    (features,) = page.tables["features"]
    # The assembler provides the names. The label's copy is important, and noise is not.
    assert features.column("feature") == [EVIL, "noise"]
    copy, noise = (float(value) for value in features.rows[0][1:2] + features.rows[1][1:2])
    assert copy > 0.1
    assert abs(noise) < copy / 10
    assert "script" not in page.tags


def test_the_columns_of_a_table_are_its_features(frame: Any, tmp_path: Path) -> None:
    network = ModelSpec("tabpack", {"rates": [1.0, 0.5], "dropouts": [0.0, 0.0], "width": 8, "depth": 1})
    table = frame.select("noise", (F.col("number") / 3).alias("copy"), "city", "amount")
    with pytest.warns(UserWarning, match="predicts the label almost perfectly: 'copy', 'amount'"):
        model = TorchClassifier(labelCol="city", model=network, epochs=4, batchSize=16).fit(table)
    page = _page(model, tmp_path, table)
    (features,) = page.tables["features"]
    assert set(features.column("feature")[:2]) == {"copy", "amount"}
    assert features.column("feature")[2] == "noise"
    drift, contributions = page.tables["drift"]
    assert set(drift.column("column")) == {"noise", "copy", "amount"}
    assert {*drift.column("missing")} == {"0.0%"}
    assert float(drift.column("PSI")[0]) < 0.1
    assert len(contributions.rows) == 10
    # A row with the values of the baseline row has no contributions of these columns.
    assert any(row.startswith(("copy", "amount")) for row in contributions.column("largest contributions"))
    assert contributions.header[0] == 'log-odds of class "b"'
    *_, uses = page.tables["data"]
    assert uses.column("column of the table") == ["noise", "copy", "amount"]
    assert uses.column("use") == ["number"] * 3
    (gradients,) = _page(model, tmp_path, table.limit(50), attributions="captum").tables["features"]
    assert gradients.column("feature")[2] == "noise"


def test_a_sample_is_bounded_and_drawn_by_its_seed(classifier: Any, frame: Any, tmp_path: Path) -> None:
    settings = {"rows": 100, "attributions": "none"}
    first, again, other = (_page(classifier, tmp_path, frame, seed=s, **settings) for s in (3, 3, 4))
    assert first.cards["held-out rows"] == "100"
    assert "100 rows of the given DataFrame, drawn at random with seed 3" in first.text["headline"]
    assert first.cards["log loss"] == again.cards["log loss"] != other.cards["log loss"]
    assert "features" not in first.tables


def test_a_regression_is_told_as_spark_evaluates_it(frame: Any, tmp_path: Path) -> None:
    pytest.importorskip("captum")
    model = TorchRegressor(model=_spec(1), labelCol="amount", epochs=2, learningRate=0.02).fit(frame)
    uri = storage.normalize(f"memory://reports/{tmp_path.name}/page.html")
    model.report(uri, frame, attributions="captum")
    page = Page(storage.read_bytes(uri).decode())
    scored = model.transform(frame)
    for name in ("rmse", "mae", "r2"):
        evaluator = RegressionEvaluator(labelCol="amount", metricName=name)
        assert float(page.cards[name.upper()]) == pytest.approx(evaluator.evaluate(scored), abs=2e-3)
    (features,) = page.tables["features"]
    assert features.header == ["feature", "mean absolute attribution"]
    assert features.column("feature")[0] == EVIL


def test_rows_of_no_finite_output_are_counted(classifier: Any, frame: Any, tmp_path: Path) -> None:
    good = frame.limit(90).cache()
    spoilt = VectorAssembler(inputCols=["endless", "noise"], outputCol="features", handleInvalid="keep")
    bad = spoilt.transform(frame.limit(7).drop("features").withColumn("endless", F.lit(float("-inf"))))
    regressor = TorchRegressor(model=_spec(1), labelCol="amount").fit(frame)
    for model in (classifier, regressor):
        rows = good, good.unionByName(bad.drop("endless"))
        first, both = (_page(model, tmp_path, each) for each in rows)
        told = "7 of these rows are left out, because their prediction or label is not finite."
        assert told in both.text["headline"]
        assert told not in first.text["headline"]
        for name in ("held-out rows", "log loss", "held-out numbers", "RMSE"):
            assert both.cards.get(name) == first.cards.get(name)


def test_a_sample_without_any_prediction_is_reported_in_a_sentence(
    classifier: Any, frame: Any, tmp_path: Path
) -> None:
    model = classifier.copy({classifier.handleInvalid: "keep"})
    page = _page(
        model, tmp_path, frame.limit(5).withColumn("features", F.expr("if(amount > 9, features, null)"))
    )
    assert (
        "None of the held-out rows can be compared: each lacks a label or a finite prediction."
        in page.text["headline"]
    )
    assert not {"classes", "features"} & set(page.tables)


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        ("true", {"attributions": "permutations"}, "did you mean 'permutation'"),
        ("true", {"rows": 0}, "rows of a report must be at least 1, got 0"),
        ("true", {"seed": -1}, "seed of a report must not be negative, got -1"),
        ("false", {}, "report needs held-out rows, but data has none"),
        ("no label", {}, "labelCol 'city'"),
    ],
)
def test_what_cannot_be_reported_is_refused_in_a_sentence(
    classifier: Any, frame: Any, tmp_path: Path, rows: str, changes: dict[str, Any], message: str
) -> None:
    data = frame.drop("city") if rows == "no label" else frame.where(rows)
    with pytest.raises(ValueError, match=message):
        classifier.report(tmp_path / "page.html", data, **changes)
    assert not (tmp_path / "page.html").exists()
