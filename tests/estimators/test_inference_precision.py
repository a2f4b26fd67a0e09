"""`inferencePrecision`: predictions in bf16 and int8 are as far from fp32 as the summary says."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ready_models import ready_model
from small_networks import Net, mlp, outputs_of
from spark_tables import quiet, values_of
from torch import nn

from ringspark.estimators import (
    TorchClassifier,
    TorchModel,
    TorchRegressionModel,
    TorchRegressor,
)
from ringspark.estimators.inference.precision import reduce_precision

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def table(spark):
    """3,000 rows in several partitions; a third are held out."""
    plain = spark.range(0, 3000, 1, 3).selectExpr("id", "array(sin(id), cos(1.7 * id)) as features")
    return plain.selectExpr(
        "id", "features", "id % 3 = 0 as held", "features[0] - 3 * features[1] as label", "label > 0 as class"
    )


def stage(folder: Path, kind: Any = TorchRegressor, **params: Any) -> Any:
    network = mlp(2 if kind is TorchClassifier else 1, hidden=64)
    return quiet(kind, folder, **{"model": network, "epochs": 2, "batchSize": 128} | params)


def column(scored: Any, name: str = "prediction") -> np.ndarray[Any, Any]:
    return np.array(values_of(scored, name))


@pytest.mark.extras
@pytest.mark.modes
@pytest.mark.parametrize("precision", ["bf16", pytest.param("int8", marks=pytest.mark.slow)])
def test_held_out_rows_differ_as_the_summary_says(table, tmp_path, precision):
    model = stage(tmp_path, inferencePrecision=precision, validationIndicatorCol="held").fit(table)
    found = model.summary.precision_difference
    assert (found.precision, found.rows_of, found.rows) == (precision, "validation", 1000)
    model.write().save(str(tmp_path / "saved"))
    loaded = TorchRegressionModel.load(str(tmp_path / "saved"))
    assert loaded.getInferencePrecision() == precision
    assert loaded.summary.precision_difference == found
    held = table.where("held")
    reduced = column(loaded.transform(held))
    exact = column(loaded.setInferencePrecision("fp32").transform(held))
    differences = np.abs(reduced - exact)
    # In int8 the rows of a pass share a scale, and the fit's passes had other rows.
    assert differences.max() == pytest.approx(found.largest, rel=1e-6 if precision == "bf16" else 0.5)
    assert differences.mean() == pytest.approx(found.mean, rel=1e-6 if precision == "bf16" else 0.3)
    assert 0 < found.mean < found.largest < 0.1 * np.abs(exact).max()


@pytest.mark.extras
@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.slow), "int8"])
def test_class_probabilities_are_compared_on_training_rows(table, tmp_path, precision):
    classifier = stage(tmp_path, TorchClassifier, labelCol="class", inferencePrecision=precision)
    model = classifier.fit(table.withColumn("class", table["class"].cast("int")))
    assert model.summary.precision_difference.rows_of == "train"
    found = model.comparePrecision(table)
    assert (found.rows_of, found.rows) == ("given", 3000)
    reduced = model.transform(table)
    exact = model.copy().setInferencePrecision("fp32").transform(table)
    differences = np.abs(column(reduced, "probability") - column(exact, "probability"))
    assert found.largest == pytest.approx(differences.max(), rel=1e-6)
    assert found.mean == pytest.approx(differences.mean(), rel=1e-6)
    changed = column(reduced) != column(exact)
    assert found.changed_classes == pytest.approx(changed.mean())


@pytest.mark.extras
def test_shards_of_a_run_stay_until_they_are_compared(table, tmp_path):
    run = tmp_path / "run"
    fitted = stage(tmp_path, inferencePrecision="bf16", runUri=str(run)).fit(table)
    found = fitted.summary.precision_difference
    assert (found.rows_of, found.rows) == ("train", 3000)
    assert [path.name for path in (run / "shards").iterdir()] == ["manifest.json"]


@pytest.mark.parametrize("handling", ["error", pytest.param("skip", marks=pytest.mark.slow), "keep"])
def test_a_table_without_vectors_is_scored_straight_from_parquet(spark, tmp_path, handling):
    """Spark then passes its columns to Python by another way than rows."""
    model = ready_model(TorchRegressionModel, mlp(hidden=64), tmp_path / "c", handleInvalid=handling)
    given = spark.range(20_000).selectExpr(
        "id", "if(id % 7 = 0, null, 'row ' || id) as note", "array(id / 20000, sin(id)) as features"
    )
    if handling != "error":
        given = given.selectExpr("id", "note", "if(id % 100 = 3, null, features) as features")
    given.coalesce(1).write.parquet(str(tmp_path / "table"))
    rows = model.transform(spark.read.parquet(str(tmp_path / "table"))).collect()
    features = np.array([row.features or [0.0, 0.0] for row in rows], np.float32)
    expected = outputs_of(model.module(), torch.from_numpy(features))[:, 0].tolist()
    kept = [i for i in range(20_000) if handling != "skip" or i % 100 != 3]
    assert [row.id for row in rows] == kept
    assert [row.note for row in rows] == [None if i % 7 == 0 else f"row {i}" for i in kept]
    invalid = [row.features is None for row in rows]
    assert [row.prediction is None for row in rows] == invalid
    found = [0.0 if row.prediction is None else row.prediction for row in rows]
    wanted = [0.0 if is_invalid else value for value, is_invalid in zip(expected, invalid, strict=True)]
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def test_int8_is_refused_before_the_training_if_there_are_no_layers(table, tmp_path):
    network = Net(lambda self, x: x @ self.slope, slope=nn.Parameter(torch.ones(2, 1)))
    fitted = ready_model(TorchModel, network, tmp_path / "c", inferencePrecision="int8")
    for use in (stage(tmp_path, model=network, inferencePrecision="int8").fit, fitted.transform):
        with pytest.raises(ValueError, match="quantizes linear layers, but Net has none"):
            use(table)


@pytest.mark.extras
def test_an_export_has_the_precision_or_says_that_it_has_not(table, tmp_path):
    model = stage(tmp_path, inferencePrecision="bf16").fit(table)
    model.export(str(tmp_path / "network.pt2"))
    x = torch.randn(9, 2)
    with torch.no_grad():
        exported = torch.export.load(str(tmp_path / "network.pt2")).module()(x)
        assert torch.equal(exported, reduce_precision(model.module(), "bf16")(x))
    with pytest.warns(UserWarning, match="in fp32 as 'torch.export', although inferencePrecision='int8'"):
        model.setInferencePrecision("int8").export(str(tmp_path / "exact.pt2"))
    with torch.no_grad():
        exported = torch.export.load(str(tmp_path / "exact.pt2")).module()(x)
        assert torch.allclose(exported, model.module()(x), rtol=1e-6)
