"""`model.evaluate` computes the training's metrics on other rows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F
from torch import nn

from ringspark.estimators import TorchClassificationModel, TorchClassifier, TorchRegressor
from ringspark.models import ModelSpec

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def table(spark):
    """300 rows in several partitions; a third are held out."""
    plain = spark.range(0, 300, 1, 5).selectExpr("id", "array(sin(id), cos(1.7 * id)) as features")
    return plain.selectExpr(
        "id",
        "features",
        "id % 3 = 0 as held",
        "cast(features[0] + features[1] / 3 > 0 as int) as label",
        "pmod(id, 4) - 1 as kind",
        "features[0] - 3 * features[1] as target",
        "array(features[0], 2 * features[1]) as both",
    )


def common(tmp_path: Path) -> dict[str, Any]:
    return {
        "epochs": 2,
        "batchSize": 32,
        "learningRate": 0.05,
        "validationIndicatorCol": "held",
        "storageUri": str(tmp_path),
        "showProgress": False,
    }


def network(outputs: int) -> ModelSpec:
    return ModelSpec("mlp", {"in_features": 2, "hidden": [8], "out_features": outputs})


CASES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "one logit": (TorchClassifier, {"model": network(1), "metrics": ["accuracy", "auroc", "log_loss"]}),
    "classes, some ignored": (
        TorchClassifier,
        {
            "model": network(3),
            "labelCol": "kind",
            "loss": nn.CrossEntropyLoss(ignore_index=-1),
            "metrics": ["accuracy", "f1", "auroc"],
        },
    ),
    "numbers": (TorchRegressor, {"model": network(1), "labelCol": "target", "metrics": ["rmse", "r2"]}),
    "arrays": (TorchRegressor, {"model": network(2), "labelCol": "both", "metrics": ["mae", "r2"]}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_held_out_rows_are_evaluated_as_the_training_did(table, tmp_path, name):
    kind, settings = CASES[name]
    model = kind(**common(tmp_path), **settings).fit(table)
    told = model.summary.epochs[-1].metrics
    expected = {metric: told[f"validation_{metric}"] for metric in settings["metrics"]}
    path = str(tmp_path / "saved")
    model.save(path)
    loaded = type(model).load(path)
    # Columns that already have the model's output names cause no error.
    held = table.where("held").withColumn("prediction", F.lit(0))
    assert loaded.evaluate(held) == pytest.approx(expected, rel=1e-5)
    assert loaded.setMetrics([settings["metrics"][1]]).evaluate(table.where("held")) == pytest.approx(
        {settings["metrics"][1]: expected[settings["metrics"][1]]}, rel=1e-5
    )


@pytest.mark.slow
def test_what_cannot_be_evaluated_is_refused_in_one_sentence(table, tmp_path):
    model = TorchClassifier(**common(tmp_path), model=network(2)).setEpochs(1).fit(table)
    assert isinstance(model, TorchClassificationModel)
    with pytest.raises(ValueError, match="evaluate needs metrics; fit with metrics"):
        model.evaluate(table)
    model.setMetrics(["accuracy"])
    assert math.isnan(model.evaluate(table.where("id < 0"))["accuracy"])
    with pytest.raises(ValueError, match="labelCol 'nope' is not a column of the DataFrame"):
        model.copy({model.labelCol: "nope"}).evaluate(table)
    with pytest.raises(ValueError, match=r"labelCol 'kind' must hold whole class numbers in 0\.\.1, got -1"):
        model.copy({model.labelCol: "kind"}).evaluate(table)
    with pytest.raises(ValueError, match="labelCol 'label' has a null or NaN"):
        model.evaluate(table.withColumn("label", F.expr("if(id = 7, null, label)")))
    with pytest.raises(ValueError, match="metrics of a classification must be among"):
        model.setMetrics(["rmse"]).evaluate(table)


def test_labels_of_other_lengths_are_refused_row_by_row(table, tmp_path):
    """Rows with 1 and 3 numbers have the same total as two rows with 2."""
    model = TorchRegressor(**common(tmp_path), model=network(2), labelCol="both", metrics=["mae"])
    model = model.setEpochs(1).fit(table)
    pairs = table.where("id in (2, 3)").coalesce(1)
    uneven = pairs.withColumn("both", F.expr("if(id = 2, slice(both, 1, 1), concat(both, array(0.5d)))"))
    with pytest.raises(ValueError, match="labelCol 'both' needs 2 numbers per row, got 1; give the label"):
        model.evaluate(uneven)
    with pytest.raises(ValueError, match="labelCol 'both' has a null or NaN"):
        model.evaluate(pairs.withColumn("both", F.expr("if(id = 2, null, both)")))
