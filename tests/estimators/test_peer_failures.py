"""Failures of the horovod.spark estimators, with one test each: `fit` and `transform` avoid them.

The claims are from the source of horovod 0.28.1. tests/test_peer_failures.py covers failures in data:
caches, splits, readers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from changing_frames import ROWS, random_function
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from pyspark.sql import functions as F
from torch import nn

from ringspark.estimators import Callback, TorchClassifier, TorchRegressor, TrainingState
from ringspark.models import ModelSpec
from ringspark.pipelines import write_shards

pytestmark = pytest.mark.spark

LINE = ModelSpec("linear", {"in_features": 2, "out_features": 1})


@pytest.fixture(scope="module")
def table(spark):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(103, 2))
    rows = [(i, [float(a), float(b)], float(a - b), int(a > 0)) for i, (a, b) in enumerate(x)]
    return spark.createDataFrame(rows, "id long, features array<double>, target double, label int").cache()


@pytest.fixture
def common(tmp_path):
    return {
        "model": LINE,
        "labelCol": "target",
        "optimizer": "sgd",
        "learningRate": 0.1,
        "batchSize": 10,
        "storageUri": str(tmp_path / "storage"),
        "showProgress": False,
    }


def _weights(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.module().parameters()])


def test_row_counts_follow_an_overwrite(table, common, tmp_path):
    """horovod.spark caches row counts with the data: after an overwrite, it takes the wrong steps per
    epoch.
    """
    uri = str(tmp_path / "shards")
    estimator = TorchRegressor(**common)
    write_shards(table.select("features", "target"), uri)
    assert estimator.fitOnShards(uri).summary.steps == 11
    write_shards(table.where("id < 47").select("features", "target"), uri, overwrite=True)
    summary = estimator.fitOnShards(uri).summary
    assert (summary.steps, summary.rows) == (5, 47)


def test_a_fit_reads_the_dataframe_it_was_given(spark, common):
    """horovod.spark's cache key is id(df) without the columns: a fit can read another DataFrame's data."""
    estimator = TorchRegressor(**common | {"model": Constant(), "learningRate": 0.5, "batchSize": 100})
    for value in (1.0, 2.0, 3.0):
        # Each object is deleted after its round, so the next DataFrame may get the same address.
        df = spark.range(20).select(F.lit(0.0).alias("features"), F.lit(value).alias("target"))
        assert estimator.fit(df).module().value.item() == pytest.approx(value)
        del df


class Constant(nn.Module):
    """Learns the mean of the labels in one step of learning rate 1/2 on the squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.value.expand(len(x))


class Parity(nn.Module):
    """Returns the last bit of an id, which only exact integers keep."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, key: torch.Tensor) -> torch.Tensor:
        return (key % 2) * self.scale


def test_ids_above_two_to_the_24_reach_the_network_exactly(spark, common):
    """horovod.spark casts every feature and label to float32: id 16,777,217 becomes 16,777,216."""
    df = spark.range(16_777_217, 16_777_227).selectExpr("id as key", "double(id % 2) as target")
    model = TorchRegressor(**common | {"model": Parity()}, featuresCol="key").fit(df)
    assert model.summary.epochs[0].train_loss == 0.0
    assert all(row.prediction == row.target for row in model.transform(df).collect())


class Order(Callback):
    """Records the rows that the first layer receives in training."""

    def __init__(self, path: str) -> None:
        self._path = path

    def on_train_start(self, state: TrainingState) -> None:
        state.module.register_forward_pre_hook(self._seen)

    def _seen(self, module: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        if module.training:
            with open(self._path, "a") as file:
                file.writelines(f"{value:.0f}\n" for value in inputs[0].flatten().tolist())


@pytest.mark.parametrize("shuffle", [False, True])
def test_shuffle_false_and_callbacks_are_obeyed(spark, common, tmp_path, shuffle):
    """horovod.spark accepts shuffle=False and callbacks, and ignores both."""
    df = spark.range(0, 50, 1, 1).selectExpr("double(id) as features", "0D as target")
    changes = {"model": Constant(), "shuffle": shuffle, "callbacks": [Order(str(tmp_path / "order"))]}
    TorchRegressor(**common | changes).fit(df)
    order = [int(line) for line in (tmp_path / "order").read_text().split()]
    assert sorted(order) == list(range(50))
    assert (order == list(range(50))) is not shuffle


def _too_fast_at_last(step: int, num_steps: int) -> float:
    return 1.0 if step < num_steps / 2 else 100.0


@pytest.mark.slow
def test_the_best_checkpoint_is_not_the_last(table, common):
    """horovod.spark returns the last checkpoint as the best one."""
    changes = {"epochs": 4, "lrSchedule": _too_fast_at_last, "maxGradNorm": 1.0, "learningRate": 0.02}
    estimator = TorchRegressor(**common | changes, validationFraction=0.3, metrics=["mae"])
    models = estimator.fit(table, [{estimator.keep: "best", estimator.monitor: "mae"}, {}])
    maes = models[0].summary.history["validation_mae"].tolist()
    assert models[0].summary.model_epoch == int(np.argmin(maes)) + 1 < 4
    assert models[1].summary.model_epoch == 4
    errors = [
        model.transform(table).selectExpr("mean(abs(prediction - target))").first()[0] for model in models
    ]
    assert errors[0] < errors[1]


def test_resume_is_not_accepted_and_ignored(table, common):
    """horovod.spark's resume starts at epoch 0 without optimizer, random state or data position."""
    with pytest.raises(ValueError, match="resume=True continues the run of a folder; set runUri"):
        TorchRegressor(**common, resume=True).fit(table)


class Start(Callback):
    """Records the initial weights of each training."""

    def __init__(self, path: str) -> None:
        self._path = path

    def on_train_start(self, state: TrainingState) -> None:
        with open(self._path, "a") as file:
            file.write(str([p.tolist() for p in state.module.parameters()]) + "\n")


@pytest.mark.slow
def test_no_fold_starts_from_another_folds_weights(table, common, tmp_path):
    """horovod.spark's fixed run id makes each fold of a CrossValidator resume from the previous fold."""
    estimator = TorchClassifier(
        **common | {"labelCol": "label", "epochs": 2, "callbacks": [Start(str(tmp_path / "start"))]}
    )
    CrossValidator(
        estimator=estimator,
        estimatorParamMaps=ParamGridBuilder().addGrid(estimator.learningRate, [0.01, 0.3]).build(),
        evaluator=MulticlassClassificationEvaluator(metricName="accuracy"),
        numFolds=2,
    ).fit(table)
    starts = (tmp_path / "start").read_text().splitlines()
    assert len(starts) == 5
    assert len(set(starts)) == 1, "every training starts from the seed's weights"


def test_an_unseeded_split_gives_each_row_to_one_side(spark, common, tmp_path):
    """horovod.spark writes train and validation separately: an unseeded split puts rows in both or in
    neither.
    """
    # Random in every execution of the plan, so a second execution would show.
    rows = random_function(spark)
    df = rows.selectExpr("double(id) as features", "0D as target", "x < 0.5 as held_out")
    seen = str(tmp_path / "order")
    model = TorchRegressor(
        **common | {"model": Constant(), "callbacks": [Order(seen)]}, validationIndicatorCol="held_out"
    ).fit(df)
    trained = [int(line) for line in Path(seen).read_text().split()]
    assert len(set(trained)) == len(trained) == model.summary.rows < ROWS
    assert model.summary.epochs[0].validation_loss is not None


def test_the_learning_rate_is_what_the_user_wrote(table, common):
    """horovod.spark multiplies the learning rate by the number of workers, silently."""
    estimator = TorchRegressor(**common | {"shuffle": False})
    models = estimator.fit(table, [{estimator.numWorkers: n} for n in (1, 3)])
    assert [model.summary.epochs[0].learning_rate for model in models] == [0.1, 0.1]
    assert (_weights(models[0]) - _weights(models[1])).abs().max() < 1e-5


def test_predictions_are_not_rounded_to_the_type_of_the_label(table, common):
    """horovod.spark rounds predictions to the label's integer type."""
    model = TorchRegressor(**common | {"labelCol": "label"}).fit(table)
    result = model.transform(table)
    assert result.schema["prediction"].dataType.simpleString() == "double"
    fractions = [row.prediction % 1 for row in result.collect()]
    assert np.mean([0.01 < fraction < 0.99 for fraction in fractions]) > 0.5


@pytest.mark.parametrize("num_workers", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 3])
def test_no_row_is_dropped_or_repeated(spark, common, tmp_path, num_workers):
    """horovod.spark takes floor(rows / batch / workers) steps of an endless reader: rows drop or repeat."""
    df = spark.range(0, 103, 1, 4).selectExpr("double(id) as features", "0D as target")
    seen = str(tmp_path / "order")
    model = TorchRegressor(
        **common | {"model": Constant(), "callbacks": [Order(seen)]}, numWorkers=num_workers, epochs=2
    ).fit(df)
    rows = sorted(int(line) for line in Path(seen).read_text().split())
    assert rows == sorted([*range(103), *range(103)])
    assert (model.summary.steps, model.summary.rows) == (22, 206)


class NeedsNoGraph(nn.Module):
    """Fails in evaluation if gradients are enabled."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.training == torch.is_grad_enabled()
        return self.linear(x)  # type: ignore[no-any-return]


def test_validation_records_no_gradients(table, common):
    """horovod.spark validates without no_grad."""
    model = TorchRegressor(**common | {"model": NeedsNoGraph()}, validationFraction=0.3).fit(table)
    assert model.summary.epochs[0].validation_loss is not None
    assert model.transform(table).count() == 103
