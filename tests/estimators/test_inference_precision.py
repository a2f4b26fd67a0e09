"""`inferencePrecision`: predictions in bf16 and int8 are as far from fp32 as the summary says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ringspark.estimators import (
    TorchClassificationModel,
    TorchClassifier,
    TorchModel,
    TorchRegressionModel,
    TorchRegressor,
)
from ringspark.estimators.inference.precision import reduce_precision
from ringspark.estimators.training.checkpoint.weights import save_checkpoint
from ringspark.models import ModelSpec
from ringspark.models.recording import record_program

pytestmark = pytest.mark.spark

REDUCED = ["bf16", "int8"]


class Own(nn.Module):
    """A network of the user's own class, which is saved as a recorded program."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 64), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


class WithoutLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.ones(2, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.slope


@pytest.fixture(scope="module")
def table(spark):
    """3,000 rows in several partitions; a third are held out."""
    plain = spark.range(0, 3000, 1, 3).selectExpr("id", "array(sin(id), cos(1.7 * id)) as features")
    return plain.selectExpr(
        "id", "features", "id % 3 = 0 as held", "features[0] - 3 * features[1] as label", "label > 0 as class"
    )


def network(outputs: int) -> ModelSpec:
    return ModelSpec("mlp", {"in_features": 2, "hidden": [64], "out_features": outputs})


def common(tmp_path: Path) -> dict[str, Any]:
    return {"epochs": 2, "batchSize": 128, "storageUri": str(tmp_path), "showProgress": False}


def column(scored: Any, name: str) -> np.ndarray[Any, Any]:
    return np.array([row[0] for row in scored.orderBy("id").select(name).collect()])


@pytest.mark.extras
@pytest.mark.modes
@pytest.mark.parametrize("precision", ["bf16", pytest.param("int8", marks=pytest.mark.slow)])
def test_held_out_rows_differ_as_the_summary_says(table, tmp_path, precision):
    stage = TorchRegressor(
        model=network(1), inferencePrecision=precision, validationIndicatorCol="held", **common(tmp_path)
    )
    model = stage.fit(table)
    found = model.summary.precision_difference
    assert (found.precision, found.rows_of, found.rows) == (precision, "validation", 1000)
    model.write().save(str(tmp_path / "saved"))
    loaded = TorchRegressionModel.load(str(tmp_path / "saved"))
    assert loaded.getInferencePrecision() == precision
    assert loaded.summary.precision_difference == found
    held = table.where("held")
    reduced = column(loaded.transform(held), "prediction")
    exact = column(loaded.setInferencePrecision("fp32").transform(held), "prediction")
    differences = np.abs(reduced - exact)
    # In int8 the rows of a pass share a scale, and the fit's passes had other rows.
    assert differences.max() == pytest.approx(found.largest, rel=1e-6 if precision == "bf16" else 0.5)
    assert differences.mean() == pytest.approx(found.mean, rel=1e-6 if precision == "bf16" else 0.3)
    assert 0 < found.mean < found.largest < 0.1 * np.abs(exact).max()


@pytest.mark.extras
@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.slow), "int8"])
def test_class_probabilities_are_compared_on_training_rows(table, tmp_path, precision):
    stage = TorchClassifier(
        model=network(2), labelCol="class", inferencePrecision=precision, **common(tmp_path)
    )
    model = stage.fit(table.withColumn("class", table["class"].cast("int")))
    assert model.summary.precision_difference.rows_of == "train"
    found = model.comparePrecision(table)
    assert (found.rows_of, found.rows) == ("given", 3000)
    reduced = model.transform(table)
    exact = model.copy().setInferencePrecision("fp32").transform(table)
    differences = np.abs(column(reduced, "probability") - column(exact, "probability"))
    assert found.largest == pytest.approx(differences.max(), rel=1e-6)
    assert found.mean == pytest.approx(differences.mean(), rel=1e-6)
    changed = column(reduced, "prediction") != column(exact, "prediction")
    assert found.changed_classes == pytest.approx(changed.mean())


@pytest.mark.extras
def test_shards_of_a_run_stay_until_they_are_compared(table, tmp_path):
    run = tmp_path / "run"
    settings = common(tmp_path) | {"storageUri": None, "runUri": str(run)}
    stage = TorchRegressor(model=network(1), inferencePrecision="bf16", **settings)
    found = stage.fit(table).summary.precision_difference
    assert (found.rows_of, found.rows) == ("train", 3000)
    assert [path.name for path in (run / "shards").iterdir()] == ["manifest.json"]


def test_fp32_is_not_compared(table, tmp_path):
    assert (
        TorchRegressor(model=network(1), **common(tmp_path)).fit(table).summary.precision_difference is None
    )


def test_a_recorded_program_quantizes_the_same_layers(tmp_path):
    module, x = Own().eval(), torch.randn(500, 2)
    program = record_program(
        module, lambda rows, length=None: (torch.zeros(rows, 2),), [{0: torch.export.Dim("batch", min=1)}], []
    )
    program.load_state_dict(module.state_dict(), assign=True)
    for precision in REDUCED:
        outputs = [reduce_precision(each, precision)(x) for each in (module, program)]  # type: ignore[arg-type]
        assert torch.equal(*outputs)
        assert not torch.equal(outputs[0].float(), module(x))


@pytest.mark.modes
def test_a_stream_predicts_in_bf16(spark, tmp_path):
    torch.manual_seed(0)
    save_checkpoint(str(tmp_path / "c"), network(3).build())
    model = TorchClassificationModel(model=network(3), inferencePrecision="bf16")
    model._set_trained(str(tmp_path / "c"), [(3,)], None)
    given = spark.range(50).selectExpr("id", "array(id / 50, sin(id)) as features")
    given.coalesce(1).write.parquet(str(tmp_path / "arriving"))
    arriving = spark.readStream.schema("id long, features array<double>").parquet(str(tmp_path / "arriving"))
    writer = model.transform(arriving).writeStream.format("parquet").trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(tmp_path / "p")).start(str(tmp_path / "scored"))
    assert query.awaitTermination(300)
    found = spark.read.parquet(str(tmp_path / "scored"))
    assert np.array_equal(column(found, "probability"), column(model.transform(given), "probability"))


@pytest.mark.parametrize("handling", ["error", pytest.param("skip", marks=pytest.mark.slow), "keep"])
def test_a_table_without_vectors_is_scored_straight_from_parquet(spark, tmp_path, handling):
    """Spark then passes its columns to Python by another way than rows."""
    torch.manual_seed(0)
    save_checkpoint(str(tmp_path / "c"), network(1).build())
    model = TorchRegressionModel(model=network(1), handleInvalid=handling)
    model._set_trained(str(tmp_path / "c"), [(1,)], None)
    given = spark.range(20_000).selectExpr(
        "id", "if(id % 7 = 0, null, 'row ' || id) as note", "array(id / 20000, sin(id)) as features"
    )
    if handling != "error":
        given = given.selectExpr("id", "note", "if(id % 100 = 3, null, features) as features")
    given.coalesce(1).write.parquet(str(tmp_path / "table"))
    rows = model.transform(spark.read.parquet(str(tmp_path / "table"))).collect()
    features = np.array([row.features or [0.0, 0.0] for row in rows], np.float32)
    with torch.no_grad():
        expected = model.module()(torch.from_numpy(features))[:, 0].tolist()
    kept = [i for i in range(20_000) if handling != "skip" or i % 100 != 3]
    assert [row.id for row in rows] == kept
    assert [row.note for row in rows] == [None if i % 7 == 0 else f"row {i}" for i in kept]
    invalid = [row.features is None for row in rows]
    assert [row.prediction is None for row in rows] == invalid
    found = [0.0 if row.prediction is None else row.prediction for row in rows]
    wanted = [0.0 if is_invalid else value for value, is_invalid in zip(expected, invalid, strict=True)]
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("value", ["fp16", "int4", 8])
def test_other_precisions_are_refused(value):
    with pytest.raises((ValueError, TypeError), match="must be 'fp32', 'bf16' or 'int8', got"):
        TorchRegressor(inferencePrecision=value)


@pytest.mark.parametrize(
    ("model", "params", "words"),
    [
        (network(1), {"inferenceUseGpu": True}, "runs on the CPU"),
        (network(1), {"inferenceOffload": "disk"}, "keeps quantized weights in memory"),
        (WithoutLayers(), {}, "quantizes linear layers, but WithoutLayers has none"),
    ],
)
def test_int8_is_refused_before_the_training(table, tmp_path, model, params, words):
    stage = TorchRegressor(model=model, inferencePrecision="int8", **params, **common(tmp_path))
    with pytest.raises(ValueError, match=words):
        stage.fit(table)
    fitted = TorchModel(model=model, inferencePrecision="int8", **params)
    save_checkpoint(str(tmp_path / "c"), model.build() if isinstance(model, ModelSpec) else model)
    with pytest.raises(ValueError, match=words):
        fitted._set_trained(str(tmp_path / "c"), [(1,)], None).transform(table)


@pytest.mark.extras
def test_an_export_has_the_precision_or_says_that_it_has_not(table, tmp_path):
    model = TorchRegressor(model=network(1), inferencePrecision="bf16", **common(tmp_path)).fit(table)
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
