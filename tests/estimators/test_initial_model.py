"""A fit that starts from a fitted model: its weights, optimizer state, vocabularies, classes and plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from safetensors.torch import load_file, save_file
from torch import nn

from ringspark.estimators import (
    Callback,
    TorchClassificationModel,
    TorchClassifier,
    TorchRegressionModel,
    TorchRegressor,
    TrainingState,
)
from ringspark.estimators.collectives import COLLECTIVES
from ringspark.estimators.options.sync import Zero
from ringspark.models import ModelSpec
from ringspark.pipelines.kinds import HashBuckets, Vocabulary

pytestmark = pytest.mark.spark

NETWORK = ModelSpec("mlp", {"in_features": 2, "hidden": [8], "out_features": 1})


class KeepFirst(Callback):
    """Saves the weights before the first step."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def on_train_start(self, state: TrainingState) -> None:
        if state.rank == state.size - 1:
            save_file({n: t.clone() for n, t in state.module.state_dict().items()}, self._path)


@pytest.fixture(scope="module")
def table(spark):
    return spark.range(0, 96, 1, 2).selectExpr("array(sin(id), cos(id)) as features", "sin(2 * id) as label")


def _estimator(root: Path, **changes: Any) -> Any:
    params: dict[str, Any] = {
        "model": NETWORK,
        "batchSize": 16,
        "shuffle": False,
        "storageUri": str(root / "storage"),
        "showProgress": False,
    }
    return TorchRegressor(**(params | changes))


def _weights(model: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = model.module().state_dict()
    return found


def _equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.slow
@pytest.mark.parametrize("collective", [name for name in ("horovod", "torch") if name in COLLECTIVES])
def test_the_first_step_sees_the_initial_weights(table, tmp_path, collective):
    # Batch normalisation has buffers, which belong to the weights.
    net = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    first = _estimator(tmp_path, model=net).fit(table)
    second = TorchRegressor(
        initialModel=first,
        numWorkers=2,
        collective=collective,
        callbacks=[KeepFirst(tmp_path / "first")],
        storageUri=str(tmp_path),
        showProgress=False,
    ).fit(table)
    assert _equal(load_file(str(tmp_path / "first")), _weights(first))
    assert not _equal(_weights(second), _weights(first))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"emaDecay": 0.5, "warmupSteps": 5},
        {"numWorkers": 2, "collective": "torch", "sync": Zero(stage=2)},
    ],
    ids=["average and warm-up", "zero 2"],
)
def test_two_fits_of_one_epoch_equal_one_of_two(table, tmp_path, changes):
    whole = _estimator(tmp_path, epochs=2, **changes).fit(table)
    first = _estimator(tmp_path, keepTrainingState=True, **changes).fit(table)
    first.save(str(tmp_path / "model"))
    first.removeRun()
    again = _estimator(
        tmp_path, initialModel=str(tmp_path / "model"), initialState="optimizer", **changes
    ).fit(table)
    assert _equal(_weights(again), _weights(whole))
    assert again.summary.epochs[0].train_loss == whole.summary.epochs[1].train_loss
    # Only the weights: the moments of Adam, and the warm-up, begin again.
    other = _estimator(tmp_path, initialModel=str(tmp_path / "model"), **changes).fit(table)
    assert not _equal(_weights(other), _weights(whole))


def test_words_and_classes_keep_their_numbers(spark, tmp_path):
    def rows(*pairs: tuple[str, str]) -> Any:
        return spark.createDataFrame([*pairs] * 20, "word string, label string").coalesce(1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(4, 3)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.embedding(ids)  # type: ignore[no-any-return]

    first = TorchClassifier(
        model=Net(),
        inputCols=["word"],
        columns={"word": Vocabulary(max_size=3)},
        storageUri=str(tmp_path),
        batchSize=20,
        learningRate=0.1,
        epochs=3,
        showProgress=False,
    )
    rows_before = rows(("b", "dog"), ("b", "dog"), ("a", "cat"), ("c", "fox"))
    model = first.fit(rows_before)
    # The new rows lack a class, have the words in another order of frequency, and an unknown one.
    made = first.copy({first.initialModel: model}).fit(rows(("a", "cat"), ("a", "cat"), ("d", "fox")))
    assert isinstance(made, TorchClassificationModel)
    assert made.labels == ["cat", "dog", "fox"]
    before, after = _weights(model)["embedding.weight"], _weights(made)["embedding.weight"]
    # AdamW without decay moves only the rows with a gradient: "a" (id 1) and unknown words (id 3).
    moved = [not torch.equal(*pair) for pair in zip(before, after, strict=True)]
    assert moved == [False, True, False, True]
    with pytest.raises(ValueError, match="no class of initialModel, 'cat', 'dog', 'fox'; drop these rows"):
        first.copy({first.initialModel: model}).fit(rows(("a", "cow")))


class Mean(nn.Module):
    """Predicts a multiple of the mean of its inputs, of any number and type."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.weight * values.float().reshape(len(values), -1).mean(1)


@pytest.mark.parametrize(
    ("column", "kind", "other", "other_kind", "message"),
    [
        ("string(id)", HashBuckets(8), "string(id)", HashBuckets(8, seed=3), "with the seed 0 .* seed 3"),
        ("date_from_unix_date(int(id))", None, "timestamp_micros(id)", None, "of a date .* of a timestamp"),
    ],
    ids=["seed", "unit"],
)
def test_numbers_of_another_meaning_are_refused(spark, tmp_path, column, kind, other, other_kind, message):
    def fit(expression: str, chosen: Any, **changes: Any) -> Any:
        columns = {} if chosen is None else {"columns": {"x": chosen}}
        settings = {"model": Mean(), "inputCols": ["x"], **columns, **changes}
        return _estimator(tmp_path, **settings).fit(spark.range(32).selectExpr(f"{expression} x", "1D label"))

    with pytest.raises(ValueError, match=f"column 'x' is .*{message}"):
        fit(other, other_kind, initialModel=fit(column, kind))


def test_fields_of_structs_are_found_by_name(spark, tmp_path):
    rows = spark.range(32).selectExpr("struct(sin(id) AS a, 100 * cos(id) AS b) AS features", "1D AS label")
    model = _estimator(tmp_path).fit(rows)
    turned = rows.selectExpr("struct(features.b, features.a) AS features", "label")
    both = [_estimator(tmp_path, initialModel=model).fit(each) for each in (rows, turned)]
    assert _equal(_weights(both[0]), _weights(both[1]))


@pytest.mark.slow
def test_a_table_keeps_its_plan(spark, tmp_path):
    def rows(shift: int) -> Any:
        return spark.range(400).selectExpr(
            f"id % 24 + {shift} AS hour",
            f"concat('port ', id % 4 + {shift}) AS origin",
            "IF(rand(2) * 30 < id % 24, 'late', 'on time') AS arrival",
        )

    base = TorchClassifier(
        labelCol="arrival", epochs=1, batchSize=64, storageUri=str(tmp_path), showProgress=False
    )
    model = base.fit(rows(0))
    model.save(str(tmp_path / "model"))
    made = base.copy({base.initialModel: str(tmp_path / "model")}).fit(rows(2))
    assert made.getModel().to_json() == model.getModel().to_json()
    assert made._inputs == model._inputs
    assert made.summary.column_uses == model.summary.column_uses
    assert not _equal(_weights(made), _weights(model))
    assert made.transform(rows(5)).count() == 400
    with pytest.raises(ValueError, match=r"trained on the column 'origin', and the table has \['hour'\]"):
        base.copy({base.initialModel: model}).fit(rows(2).drop("origin"))


def test_pipelines_and_folds_start_from_the_model(table, tmp_path):
    model = _estimator(tmp_path).fit(table)
    stage = _estimator(tmp_path, initialModel=model, learningRate=1e-12)
    pipeline = Pipeline(stages=[stage]).fit(table)
    (fitted,) = pipeline.stages
    assert all(torch.allclose(t, _weights(model)[n]) for n, t in _weights(fitted).items())
    pipeline.save(str(tmp_path / "pipeline"))
    again = stage.copy({stage.initialModel: str(tmp_path / "pipeline")}).fit(table)
    assert all(torch.allclose(t, _weights(model)[n]) for n, t in _weights(again).items())
    validator = CrossValidator(
        estimator=stage,
        evaluator=RegressionEvaluator(),
        estimatorParamMaps=ParamGridBuilder().addGrid(stage.learningRate, [1e-12, 1e-13]).build(),
        numFolds=2,
    )
    best = validator.fit(table).bestModel
    assert all(torch.allclose(t, _weights(model)[n]) for n, t in _weights(best).items())


def test_a_saved_stage_names_a_saved_model(table, tmp_path):
    model = _estimator(tmp_path).fit(table)
    stage = _estimator(tmp_path, initialModel=model)
    grid = ParamGridBuilder().addGrid(stage.learningRate, [1e-12]).build()
    validator = CrossValidator(estimator=stage, evaluator=RegressionEvaluator(), estimatorParamMaps=grid)
    holders: dict[str, Any] = {"stage": stage, "pipeline": Pipeline(stages=[stage]), "validator": validator}
    for name, holder in holders.items():
        with pytest.raises(ValueError, match="save that model, and set initialModel to its path"):
            holder.save(str(tmp_path / name))
    with pytest.raises(ValueError, match=r"the only weights of this model are in .*; save the model first"):
        model.removeRun()
    model.save(str(tmp_path / "model"))
    stage.setInitialModel(str(tmp_path / "model")).save(str(tmp_path / "stage"))
    assert TorchRegressor.load(str(tmp_path / "stage")).fit(table).summary.steps == 6
    for name, holder in holders.items():
        holder.write().overwrite().save(str(tmp_path / name))
    (piped,) = Pipeline.load(str(tmp_path / "pipeline")).getStages()
    validated: Any = CrossValidator.load(str(tmp_path / "validator")).getEstimator()
    assert [one.getInitialModel() for one in (piped, validated)] == [str(tmp_path / "model")] * 2


def test_what_does_not_fit_the_model_is_refused(table, tmp_path):
    model = _estimator(tmp_path).fit(table)

    def refused(message: str, rows: Any = table, **changes: Any) -> None:
        with pytest.raises(ValueError, match=message):
            _estimator(tmp_path, **({"initialModel": model} | changes)).fit(rows)

    wide = ModelSpec("mlp", {"in_features": 2, "hidden": [9], "out_features": 1})
    refused(r"of shape \[1, 8\], but the model's has shape \[1, 9\]; leave model unset", model=wide)
    refused(r"takes the columns \['features'\], and the estimator has \['x'\]", inputCols=["x"])
    refused("predicts the label 'label', and labelCol is 'y'", labelCol="y")
    refused("fit the initial model with keepTrainingState=True", initialState="optimizer")
    refused("both set the initial weights", pretrained=str(tmp_path))
    refused(
        "column 'features' is .*2.* for initialModel and .*3",
        table.selectExpr("array(1D, 2D, 3D) AS features", "label"),
    )
    classifier = TorchClassifier(initialModel=model, storageUri=str(tmp_path))
    with pytest.raises(ValueError, match="must be a TorchClassificationModel, got a TorchRegressionModel"):
        classifier.fit(table)
    kept = _estimator(tmp_path, keepTrainingState=True).fit(table)
    refused(
        "optimizer AdamW in 1 .* this one has SGD .* or set initialState='weights'",
        initialModel=kept,
        initialState="optimizer",
        optimizer="sgd",
    )


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.slow
def test_a_stream_trains_one_model(spark, tmp_path):
    arriving, saved, storage = (str(tmp_path / name) for name in ("arriving", "model", "storage"))
    table = spark.range(20 * 64).selectExpr("array(sin(id), cos(id)) AS features", "2 * sin(id) AS label")
    table.repartition(20).write.parquet(arriving)
    estimator = _estimator(tmp_path, keepTrainingState=True, learningRate=0.03)
    estimator.fit(table.limit(16)).save(saved)
    losses, resident = [], []

    def train(rows: Any, batch: int) -> None:
        start = estimator.copy({estimator.initialModel: saved, estimator.initialState: "optimizer"})
        model = start.fit(rows)
        model.write().overwrite().save(saved)
        model.removeRun()
        losses.append(
            TorchRegressionModel.load(saved)
            .transform(table)
            .selectExpr("avg(pow(prediction - label, 2))")
            .first()[0]
        )
        resident.append(_resident_bytes())

    query = (
        spark.readStream.schema(table.schema)
        .option("maxFilesPerTrigger", 1)
        .parquet(arriving)
        .writeStream.foreachBatch(train)
        .option("checkpointLocation", str(tmp_path / "progress"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(500)
    assert query.exception() is None
    assert len(losses) == 20
    assert losses[-1] < losses[0] / 2
    # The first fit's run, from before the stream.
    assert len(list(Path(storage).iterdir())) == 1
    assert len(list(Path(saved, "checkpoints").iterdir())) == 1
    assert resident[-1] - resident[4] < 32 << 20
