"""`model.evaluate` computes the training's metrics on other rows."""

import math
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F
from small_networks import mlp
from spark_tables import quiet
from torch import nn

from ringspark.estimators import TorchClassifier, TorchRegressor

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def table(spark):
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


def stage(folder: Path, kind: Any = TorchRegressor, **changes: Any) -> Any:
    settings = {"epochs": 2, "batchSize": 32, "learningRate": 0.05, "validationIndicatorCol": "held"}
    return quiet(kind, folder, **settings | changes)


IGNORING = {"labelCol": "kind", "loss": nn.CrossEntropyLoss(ignore_index=-1)}

CASES = {
    "one logit": (TorchClassifier, {"model": mlp(), "metrics": ["accuracy", "auroc", "log_loss"]}),
    "classes, some ignored": (
        TorchClassifier,
        IGNORING | {"model": mlp(3), "metrics": ["accuracy", "f1", "auroc"]},
    ),
    "numbers": (TorchRegressor, {"model": mlp(), "labelCol": "target", "metrics": ["rmse", "r2"]}),
    "arrays": (TorchRegressor, {"model": mlp(2), "labelCol": "both", "metrics": ["mae", "r2"]}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_held_out_rows_are_evaluated_as_the_training_did(table, tmp_path, name):
    kind, settings = CASES[name]
    model = stage(tmp_path, kind, **settings).fit(table)
    told = model.summary.epochs[-1].metrics
    expected = {metric: told[f"validation_{metric}"] for metric in settings["metrics"]}
    path = str(tmp_path / "saved")
    model.save(path)
    loaded = type(model).load(path)
    # Columns that already have the model's output names cause no error.
    held = table.where("held").withColumn("prediction", F.lit(0))
    assert loaded.evaluate(held) == pytest.approx(expected, rel=1e-5)
    second = settings["metrics"][1]
    found = loaded.setMetrics([second]).evaluate(table.where("held"))
    assert found == pytest.approx({second: expected[second]}, rel=1e-5)


def test_labels_of_other_lengths_are_refused_row_by_row(table, tmp_path):
    """Rows with 1 and 3 numbers have the same total as two rows with 2."""
    model = stage(tmp_path, model=mlp(2), labelCol="both", metrics=["mae"], epochs=1).fit(table)
    pairs = table.where("id in (2, 3)").coalesce(1)
    uneven = pairs.withColumn("both", F.expr("if(id = 2, slice(both, 1, 1), concat(both, array(0.5d)))"))
    with pytest.raises(ValueError, match="labelCol 'both' needs 2 numbers per row, got 1; give the label"):
        model.evaluate(uneven)
    with pytest.raises(ValueError, match="labelCol 'both' has a null or NaN"):
        model.evaluate(pairs.withColumn("both", F.expr("if(id = 2, null, both)")))
    assert math.isnan(model.evaluate(table.where("id < 0"))["mae"])
