"""A fit that starts from a fitted model: its weights, optimizer state, vocabularies, classes and plan."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from acting_callback import Acts
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from safetensors.torch import load_file, save_file
from small_networks import Net, mlp
from spark_tables import quiet, waves
from torch import nn

from ringspark.estimators import (
    TorchClassificationModel,
    TorchClassifier,
    TorchRegressionModel,
    TorchRegressor,
    TrainingState,
)
from ringspark.estimators.collectives import COLLECTIVES
from ringspark.estimators.initial_model import table_kind
from ringspark.estimators.options.sync import Zero
from ringspark.pipelines.kinds import HashBuckets, Vocabulary

pytestmark = pytest.mark.spark

NETWORK = mlp()


def keep_first(path: Path, state: TrainingState) -> None:
    """Saves the weights before the first step."""
    if state.rank == state.size - 1:
        save_file({n: t.clone() for n, t in state.module.state_dict().items()}, str(path))


@pytest.fixture(scope="module")
def table(spark):
    return waves(spark)


def _estimator(root: Path, kind: Any = TorchRegressor, **changes: Any) -> Any:
    params = {"model": NETWORK, "batchSize": 16, "shuffle": False}
    return quiet(kind, root / "storage", **(params | changes))


@pytest.fixture(scope="module")
def trained(table, tmp_path_factory):
    return _estimator(tmp_path_factory.mktemp("trained")).fit(table)


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
    settings = {
        "numWorkers": 2,
        "collective": collective,
        "callbacks": [Acts(train_start=partial(keep_first, tmp_path / "first"))],
    }
    second = quiet(TorchRegressor, tmp_path, initialModel=first, **settings).fit(table)
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
    start = {"initialModel": str(tmp_path / "model"), "initialState": "optimizer"}
    again = _estimator(tmp_path, **start, **changes).fit(table)
    assert _equal(_weights(again), _weights(whole))
    assert again.summary.epochs[0].train_loss == whole.summary.epochs[1].train_loss
    # Only the weights: the moments of Adam, and the warm-up, begin again.
    other = _estimator(tmp_path, initialModel=str(tmp_path / "model"), **changes).fit(table)
    assert not _equal(_weights(other), _weights(whole))


def test_words_and_classes_keep_their_numbers(spark, tmp_path):
    def rows(*pairs: tuple[str, str]) -> Any:
        return spark.createDataFrame([*pairs] * 20, "word string, label string").coalesce(1)

    # Spark finds columns in any case.
    columns = {"labelCol": "LABEL", "inputCols": ["word"], "columns": {"word": Vocabulary(max_size=3)}}
    settings = {"model": nn.Embedding(4, 3), "batchSize": 20, "learningRate": 0.1, "epochs": 3}
    first = quiet(TorchClassifier, tmp_path, **columns, **settings)
    rows_before = rows(("b", "dog"), ("b", "dog"), ("a", "cat"), ("c", "fox"))
    model = first.fit(rows_before)
    # The new rows lack a class, have the words in another order of frequency, and an unknown one.
    made = first.copy({first.initialModel: model}).fit(rows(("a", "cat"), ("a", "cat"), ("d", "fox")))
    assert isinstance(made, TorchClassificationModel)
    assert made.labels == ["cat", "dog", "fox"]
    before, after = _weights(model)["weight"], _weights(made)["weight"]
    # AdamW without decay moves only the rows with a gradient: "a" (id 1) and unknown words (id 3).
    moved = [not torch.equal(*pair) for pair in zip(before, after, strict=True)]
    assert moved == [False, True, False, True]
    with pytest.raises(ValueError, match="no class of initialModel, 'cat', 'dog', 'fox'; drop these rows"):
        first.copy({first.initialModel: model}).fit(rows(("a", "cow")))


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
        network = Net(
            lambda self, x: self.weight * x.float().reshape(len(x), -1).mean(1),
            weight=nn.Parameter(torch.ones(())),
        )
        settings = {"model": network, "inputCols": ["x"], **columns, **changes}
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

    base = quiet(TorchClassifier, tmp_path, labelCol="arrival", epochs=1, batchSize=64)
    model = base.fit(rows(0))
    model.save(str(tmp_path / "model"))
    made = base.copy({base.initialModel: str(tmp_path / "model")}).fit(rows(2))
    assert made.getModel().to_json() == model.getModel().to_json()
    old, new = table_kind(model), table_kind(made)
    assert new != old  # each fit counts its own rows
    assert new.without_counts() == old.without_counts()
    assert made.summary.column_uses == model.summary.column_uses
    assert not _equal(_weights(made), _weights(model))
    assert made.transform(rows(5)).count() == 400
    with pytest.raises(ValueError, match=r"trained on the column 'origin', and the table has \['hour'\]"):
        base.copy({base.initialModel: model}).fit(rows(2).drop("origin"))


def test_pipelines_and_folds_start_from_the_model(table, trained, tmp_path):
    stage = _estimator(tmp_path, initialModel=trained, learningRate=1e-12)
    pipeline = Pipeline(stages=[stage]).fit(table)
    pipeline.save(str(tmp_path / "pipeline"))
    again = stage.copy({stage.initialModel: str(tmp_path / "pipeline")}).fit(table)
    validator = CrossValidator(
        estimator=stage,
        evaluator=RegressionEvaluator(),
        estimatorParamMaps=ParamGridBuilder().addGrid(stage.learningRate, [1e-13]).build(),
        numFolds=2,
    )
    best = validator.fit(table).bestModel
    for fitted in (*pipeline.stages, again, best):
        assert all(torch.allclose(t, _weights(trained)[n]) for n, t in _weights(fitted).items())


def test_a_saved_stage_names_a_saved_model(table, trained, tmp_path):
    stage = _estimator(tmp_path, initialModel=trained)
    grid = ParamGridBuilder().addGrid(stage.learningRate, [1e-12]).build()
    validator = CrossValidator(estimator=stage, evaluator=RegressionEvaluator(), estimatorParamMaps=grid)
    holders: dict[str, Any] = {"stage": stage, "pipeline": Pipeline(stages=[stage]), "validator": validator}
    for name, holder in holders.items():
        with pytest.raises(ValueError, match="save that model, and set initialModel to its path"):
            holder.save(str(tmp_path / name))
    with pytest.raises(ValueError, match=r"the only weights of this model are in .*; save the model first"):
        trained.removeRun()
    trained.save(str(tmp_path / "model"))
    stage.setInitialModel(str(tmp_path / "model")).save(str(tmp_path / "stage"))
    assert TorchRegressor.load(str(tmp_path / "stage")).fit(table).summary.steps == 6
    for name, holder in holders.items():
        holder.write().overwrite().save(str(tmp_path / name))
    (piped,) = Pipeline.load(str(tmp_path / "pipeline")).getStages()
    validated: Any = CrossValidator.load(str(tmp_path / "validator")).getEstimator()
    assert [one.getInitialModel() for one in (piped, validated)] == [str(tmp_path / "model")] * 2


def test_the_state_of_another_optimizer_is_refused(table, tmp_path):
    kept = _estimator(tmp_path, keepTrainingState=True).fit(table)
    other = _estimator(tmp_path, initialModel=kept, initialState="optimizer", optimizer="sgd")
    refusal = "optimizer AdamW in 1 .* this one has SGD .* or set initialState='weights'"
    with pytest.raises(ValueError, match=refusal):
        other.fit(table)


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
        scored = TorchRegressionModel.load(saved).transform(table)
        losses.append(scored.selectExpr("avg(pow(prediction - label, 2))").first()[0])
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)

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
