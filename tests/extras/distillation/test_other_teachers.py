"""Teachers that are no model of ringspark: columns, scikit-learn estimators and models of Spark ML."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity import assert_equal_weights
from pyspark.ml import Pipeline
from pyspark.ml.classification import DecisionTreeClassifier, LogisticRegression
from pyspark.ml.feature import StringIndexer, VectorAssembler
from pyspark.ml.functions import array_to_vector
from pyspark.ml.regression import LinearRegression as SparkLinearRegression
from pyspark.sql import functions as F
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LinearRegression
from sklearn.linear_model import LogisticRegression as SklearnLogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from ringspark.estimators import TorchClassifier, TorchEstimator, TorchRegressor
from ringspark.estimators.prepared_fit import prepare_fit
from ringspark.extras.distillation.distance import _log_probabilities
from ringspark.models import ModelSpec
from ringspark.pipelines.kinds import Vocabulary

pytestmark = pytest.mark.spark

# Not in the order of the columns.
INPUTS = ["second", "first"]


@pytest.fixture(scope="module")
def rows(spark: Any) -> Any:
    frame = spark.range(0, 120, 1, 2).selectExpr(
        "id", "sin(id) as first", "cos(3 * id) as second", "cast(id * 7 % 11 % 3 as int) as number"
    )
    return frame.selectExpr(
        "*", "array(first, second) as features", "concat('class ', number) as name", "number % 2 as flag",
        "2 * first - second as value",
    )  # fmt: skip


@pytest.fixture(scope="module")
def table(rows: Any) -> Any:
    return rows.toPandas().sort_values("id")


def _estimator(kind: Any = TorchClassifier, label: str = "name", width: int = 3, **changes: Any) -> Any:
    model = ModelSpec("mlp", {"in_features": 2, "hidden": [8], "out_features": width})
    changes = {"model": model, "batchSize": 32, "epochs": 2} | changes
    return kind(labelCol=label, showProgress=False, **changes)


def _soft_labels(estimator: Any, rows: Any) -> np.ndarray:
    """Returns what the loss gets of the teacher, (rows, outputs)."""
    fit = prepare_fit(estimator, rows)
    name = fit.estimator._soft_label_column
    frame = fit.dataset.select("id", F.col(name).alias("soft")).toPandas().sort_values("id")
    return np.stack(list(frame["soft"])).reshape(len(frame), -1)


def _probabilities(soft: np.ndarray) -> np.ndarray:
    return _log_probabilities(torch.from_numpy(soft).float(), 1.0).exp().numpy()


@pytest.mark.parametrize("label", ["name", "flag"])
def test_the_loss_gets_the_probabilities_of_every_form(rows: Any, table: Any, label: str) -> None:
    forest = RandomForestClassifier(5, random_state=0).fit(table[INPUTS], table[label])
    unnamed = RandomForestClassifier(5, random_state=0).fit(np.stack(list(table["features"])), table[label])
    boosting = make_pipeline(StandardScaler(), HistGradientBoostingClassifier(max_iter=5))
    boosting.fit(table[INPUTS], table[label])
    width = table[label].nunique()
    for teacher in (forest, boosting, unnamed):
        values = np.stack(list(table["features"])) if teacher is unnamed else table[INPUTS]
        expected = teacher.predict_proba(values)
        assert teacher is boosting or (expected == 0).any()
        found = _probabilities(_soft_labels(_estimator(label=label, width=width, teacher=teacher), rows))
        np.testing.assert_allclose(found, expected, atol=1e-6)
    listed = table[["id", label]].assign(list=expected.tolist())
    given = rows.sparkSession.createDataFrame(listed).withColumn("dense", array_to_vector("list"))
    for column in ["list", "dense", *(["list[1]"] if width == 2 else [])]:
        columns = given.withColumn("given", F.expr(column))
        soft = _soft_labels(_estimator(label=label, width=width, teacher="given"), columns)
        np.testing.assert_allclose(_probabilities(soft), expected, atol=1e-6)


def test_a_pipeline_of_spark_teaches_by_the_names_of_its_classes(rows: Any, table: Any) -> None:
    more = rows.union(rows.where("number = 2"))  # which becomes class 0 of the indexer
    stages = [
        StringIndexer(inputCol="name", outputCol="index"),
        VectorAssembler(inputCols=INPUTS, outputCol="vector"),
        DecisionTreeClassifier(featuresCol="vector", labelCol="index", maxDepth=2),
    ]
    teacher = Pipeline(stages=stages).fit(more)
    assert teacher.stages[0].labels[0] == "class 2"
    # The rows have a column with the name of the teacher's own.
    estimator = _estimator(teacher=teacher)
    fit = prepare_fit(estimator, rows.withColumn("probability", F.lit(0.0)))
    assert fit.estimator.getColumns()["name"] == Vocabulary(words=teacher.stages[0].labels, order="alphabet")
    scored = teacher.transform(rows).toPandas().sort_values("id")
    expected = np.stack([vector.toArray() for vector in scored["probability"]])
    np.testing.assert_allclose(_probabilities(_soft_labels(estimator, rows)), expected, atol=1e-6)


@pytest.mark.parametrize("model", [pytest.param("table", marks=pytest.mark.telling), "network"])
def test_a_student_of_an_estimator_equals_one_of_its_column(
    rows: Any, table: Any, model: str, tmp_path: Path
) -> None:
    teacher = SklearnLogisticRegression().fit(table[INPUTS], table["name"])
    found = dict(zip(table["id"], teacher.predict_proba(table[INPUTS]).tolist(), strict=True))
    given = rows.sparkSession.createDataFrame(list(found.items()), "id long, taught array<double>")
    both = rows.join(given, "id").repartition(2, "id").sortWithinPartitions("id")
    both = both.select("first", "second", "features", "taught", "name").localCheckpoint()
    changes: dict[str, Any] = {"alpha": 1.0, "storageUri": str(tmp_path), "metrics": ["accuracy"]}
    without = both.drop("features")
    if model == "table":
        spec = ModelSpec("tabpack", {"rates": [1.0, 1.0], "dropouts": [0.0, 0.0], "width": 8})
        changes |= {"model": spec, "epochs": 1}
        both = without
    by_column = _estimator(teacher="taught", **changes).fit(both)
    # One worker, and no column of the teacher.
    by_estimator = _estimator(teacher=teacher, **changes).fit(both.drop("taught"))
    assert_equal_weights(by_column, by_estimator, 1e-6)
    if model == "table":
        assert [use.column for use in by_column.summary.column_uses] == ["first", "second"]
    # Neither a prediction nor an evaluation needs the teacher.
    assert by_column.evaluate(both.drop("taught"))["accuracy"] > 0
    twice = _estimator(teacher=teacher, numWorkers=2, **changes).fit(both.drop("taught"))
    assert_equal_weights(by_estimator, twice, 1e-5)


def test_values_of_every_form_are_imitated(rows: Any, table: Any, tmp_path: Path) -> None:
    assembled = VectorAssembler(inputCols=INPUTS, outputCol="vector").transform(rows)
    spark = SparkLinearRegression(featuresCol="vector", labelCol="value").fit(assembled)
    exact = rows.withColumn("decimal", F.col("value").cast("decimal(20,15)"))
    for teacher in (LinearRegression().fit(table[INPUTS], table["value"]), spark, "decimal"):
        estimator = _estimator(TorchRegressor, "value", 1, teacher=teacher)
        found = _soft_labels(estimator, assembled if teacher is spark else exact)
        np.testing.assert_allclose(found[:, 0], table["value"], atol=1e-6)
    alone = _estimator(TorchRegressor, "value", 1, storageUri=str(tmp_path))
    # The label itself as the teacher: with alpha 1 the distance is the loss.
    taught = alone.copy({alone.teacher: "copy", alone.alpha: 1.0}).fit(
        rows.withColumn("copy", F.col("value"))
    )
    assert_equal_weights(taught, alone.fit(rows), 1e-6)


def test_a_logit_per_label(rows: Any, table: Any) -> None:
    estimator = _estimator(TorchEstimator, "flag", 1, loss="bce_with_logits")
    given = rows.withColumn("p", F.expr("(1 + first) / 3"))
    for teacher in ("p", SklearnLogisticRegression().fit(table[INPUTS], table["flag"])):
        expected = (1 + table["first"]) / 3
        if teacher != "p":
            expected = teacher.predict_proba(table[INPUTS])[:, 1]
        soft = _soft_labels(estimator.copy({estimator.teacher: teacher}), given)
        np.testing.assert_allclose(1 / (1 + np.exp(-soft[:, 0])), expected, atol=1e-6)


def test_rows_without_valid_outputs_are_refused_or_skipped(rows: Any, tmp_path: Path) -> None:
    def fit(outputs: str, **changes: Any) -> Any:
        given = rows.withColumn("p", F.expr(f"if(id = 7, {outputs}, array(0.5D, 0.25D, 0.25D))"))
        return _estimator(teacher="p", storageUri=str(tmp_path), **changes).fit(given)

    refused = {
        "null": "teacher 'p' has a null, a NaN or an infinite value; drop",
        "array(0.5D, null, 0.5D)": "teacher 'p' has a null",
        "array(0.5D, double('nan'), 0.5D)": "teacher 'p' has a null, a NaN",
        "array(0.5D, 0.25D, 0.2D)": r"with the sum 1 .*, got \[0.5, 0.25, 0.2\]; give",
        "array(1.5D, -0.25D, -0.25D)": "probabilities from 0 to 1",
        "array(0.5D, 0.5D)": "teacher has arrays of 1 to 3 elements; give every row the same number",
    }
    for outputs, message in refused.items():
        with pytest.raises(ValueError, match=message):
            fit(outputs)
    assert fit("null", handleInvalid="skip", epochs=1).summary.epochs[0].rows == 119


def test_a_teacher_that_fails_in_a_worker_says_why(rows: Any, table: Any) -> None:
    values = np.stack(list(table["features"]))
    teacher = SklearnLogisticRegression().fit(np.hstack([values, values]), table["name"])
    with pytest.raises(
        RuntimeError, match=r"teacher LogisticRegression failed on .*features, but .*; give the columns"
    ):
        _estimator(teacher=teacher).fit(rows)


def test_a_resumed_run_knows_its_teacher_again(rows: Any, table: Any, tmp_path: Path) -> None:
    teacher = RandomForestClassifier(3, random_state=0).fit(table[INPUTS], table["name"])
    uri = str(tmp_path / "run")
    first = _estimator(teacher=teacher, runUri=uri, keepTrainingState=True, epochs=1).fit(rows)
    loaded = pickle.loads(pickle.dumps(teacher))
    again = _estimator(teacher=loaded, runUri=uri, keepTrainingState=True, epochs=2, resume=True).fit(rows)
    assert (len(first.summary.epochs), len(again.summary.epochs)) == (1, 2)
    other = SklearnLogisticRegression().fit(table[INPUTS], table["name"])
    with pytest.raises(ValueError, match=r"cannot be resumed, .*__ringspark_teacher"):
        _estimator(teacher=other, runUri=uri, keepTrainingState=True, epochs=3, resume=True).fit(rows)


def test_a_saved_estimator_keeps_a_column_and_refuses_a_model_of_spark(rows: Any, tmp_path: Path) -> None:
    _estimator(teacher="p").save(str(tmp_path / "column"))
    assert TorchClassifier.load(str(tmp_path / "column")).getTeacher() == "p"
    assembled = VectorAssembler(inputCols=INPUTS, outputCol="vector").transform(rows)
    model = LogisticRegression(featuresCol="vector", labelCol="number", maxIter=1).fit(assembled)
    with pytest.raises(ValueError, match=r"a model in memory; .* a column that it added to the rows"):
        _estimator(teacher=model).save(str(tmp_path / "model"))
