"""The stages as a Spark ML user calls them, on local, local-cluster and Connect."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.ml.evaluation import MulticlassClassificationEvaluator, RegressionEvaluator
from pyspark.ml.functions import array_to_vector
from pyspark.sql import functions as F
from small_networks import linear, mlp
from spark_tables import quiet
from torch import nn

from ringspark.estimators import Callback, TorchClassifier, TorchRegressor, TrainingState
from ringspark.estimators.prepared_fit import prepare_fit
from ringspark.models import ModelSpec
from ringspark.pipelines import write_shards

pytestmark = pytest.mark.spark

MLP, LINE = mlp(2, hidden=16), linear()


@pytest.fixture(scope="module")
def storage_uri(tmp_path_factory):
    return str(tmp_path_factory.mktemp("storage"))


@pytest.fixture(scope="module")
def table(spark):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(240, 2))
    rows = [
        (i, float(a), float(b), float(a + b > 0), float(2 * a - b + 1), f"row {i}")
        for i, (a, b) in enumerate(x)
    ]
    frame = spark.createDataFrame(
        rows, "id long, a double, b double, label double, target double, note string"
    )
    features = array_to_vector(F.array("a", "b")).alias("features")
    return frame.select("*", features).repartition(3)


def _stage(folder: Any, kind: Any = TorchClassifier, **params: Any) -> Any:
    return quiet(kind, folder, **{"model": MLP, "epochs": 2, "batchSize": 64} | params)


def test_a_regression_finds_the_line_and_keeps_fractions(table, storage_uri):
    settings = {"labelCol": "target", "epochs": 40, "batchSize": 32, "learningRate": 0.05}
    model = _stage(storage_uri, TorchRegressor, model=LINE, **settings).fit(table)
    assert RegressionEvaluator(labelCol="target", metricName="rmse").evaluate(model.transform(table)) < 0.05
    weight = next(model.module().parameters()).detach().numpy()
    np.testing.assert_allclose(weight, [[2.0, -1.0]], atol=0.05)


def test_column_names_with_dots_are_names(table, storage_uri):
    frame = table.select("id", F.col("features").alias("my.features"), F.col("label").alias("my.label"))
    model = _stage(storage_uri, featuresCol="my.features", labelCol="my.label", epochs=1).fit(frame)
    assert model.transform(frame).count() == 240


@pytest.mark.modes
def test_fit_on_shards_leaves_the_shards_and_equals_fit(table, storage_uri, tmp_path):
    # In one order, because two writes may order the partitions differently.
    rows = table.select("id", "features", "label").coalesce(1).sortWithinPartitions("id")
    manifest = write_shards(rows.select("features", "label"), str(tmp_path / "shards"))
    estimator = _stage(storage_uri, numWorkers=2)
    first, second = estimator.fitOnShards(manifest.uri), estimator.fit(rows)
    manifest.verify()
    for a, b in zip(first.module().parameters(), second.module().parameters(), strict=True):
        assert a.equal(b)


class LayersSeen(Callback):
    """Records the output dtype of each call to rank 0's linear layers."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.types: list[str] = []

    def on_train_start(self, state: TrainingState) -> None:
        for layer in state.module.modules():
            if isinstance(layer, nn.Linear):
                layer.register_forward_hook(lambda _, __, output: self.types.append(str(output.dtype)))

    def on_train_end(self, state: TrainingState) -> None:
        if state.rank == 0:
            Path(self.path).write_text(" ".join(self.types))


@pytest.mark.modes
def test_precision_and_checkpointing_are_params(table, storage_uri, spark_stages, tmp_path):
    deep = ModelSpec("mlp", {"in_features": 2, "hidden": [16] * 4, "out_features": 2})
    seen = LayersSeen(str(tmp_path / "types"))
    settings = {"model": deep, "numWorkers": 2, "epochs": 8, "batchSize": 32, "learningRate": 0.02}
    lean = {"precision": "bf16", "gradientCheckpointing": "sqrt", "callbacks": [seen]}
    model = _stage(storage_uri, **settings, **lean).fit(table)
    types = (tmp_path / "types").read_text().split()
    assert set(types) == {"torch.bfloat16"}
    # Five layers in two checkpointed segments; the first segment is recomputed.
    assert len(types) == (5 + 2) * model.summary.steps
    assert {p.dtype for p in model.module().parameters()} == {torch.float32}
    accuracy = MulticlassClassificationEvaluator(metricName="accuracy").evaluate(model.transform(table))
    assert accuracy > 0.95


def test_a_runs_folder_holds_the_model_and_no_data(table, tmp_path):
    model = _stage(tmp_path / "s", epochs=1).fit(table)
    (run,) = (tmp_path / "s").iterdir()
    assert str(run) == model.summary.run_uri
    records = ["config", "data", "environment", "history", "owner", "progress", "result", "run"]
    assert sorted(p.name for p in run.iterdir()) == ["checkpoint", *(f"{name}.json" for name in records)]


def test_progress_is_shown_on_the_driver(table, storage_uri, capsys):
    TorchClassifier(model=MLP, epochs=2, batchSize=64, storageUri=storage_uri).fit(table)
    printed = capsys.readouterr().err
    assert "epoch 1: loss 0." in printed
    assert "epoch 2: loss 0." in printed


@pytest.mark.telling
@pytest.mark.extras
def test_texts_of_numbers_and_dates_are_read_on_every_spark(spark):
    """Before Spark 4.0, a column has no try_cast, but answers to every name."""
    rows = spark.range(200).selectExpr(
        "id % 2 AS label",
        "string(id * 1.5) AS number",
        "date_format(date_add(DATE'2020-01-01', int(id)), 'dd/MM/yyyy') AS day",
    )
    fit = prepare_fit(TorchClassifier(labelCol="label"), rows)
    assert [use.use for use in fit.uses] == ["number", "date"]
