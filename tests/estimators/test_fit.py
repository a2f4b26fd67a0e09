"""`fit`: one write for several parameter maps, validation rows, metrics, callbacks, any module, warnings."""

import sys
import warnings
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch
from acting_callback import Acts
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import BinaryClassificationEvaluator
from pyspark.ml.functions import array_to_vector
from pyspark.ml.linalg import Vectors
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder, TrainValidationSplit
from pyspark.sql import functions as F
from small_networks import Net, mlp, outputs_of, two_heads
from spark_tables import spark_conf, values_of
from torch import nn
from waiting import wait_for

from ringspark.estimators import (
    Callback,
    TorchClassifier,
    TorchEstimator,
    TorchRegressor,
    TrainingState,
    WorkerError,
)
from ringspark.estimators.stages import fit_data
from ringspark.pipelines import Sparse, write_shards

pytestmark = pytest.mark.spark

MLP = mlp(2, hidden=16)


@pytest.fixture(scope="module")
def table(spark):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(240, 2))
    rows = [(i, float(a), float(b), float(a + b > 0), float(a - b)) for i, (a, b) in enumerate(x)]
    frame = spark.createDataFrame(rows, "id long, a double, b double, label double, target double")
    return frame.select(
        "*",
        array_to_vector(F.array("a", "b")).alias("features"),
        F.when(F.col("id") % 10 != 3, F.col("a")).alias("holey"),
        F.when(F.col("id") % 10 == 4, F.lit(float("nan"))).otherwise(F.col("b")).alias("broken"),
    ).repartition(3)


@pytest.fixture
def common(tmp_path):
    place = {"storageUri": str(tmp_path / "storage"), "showProgress": False}
    return {"model": MLP, "epochs": 2, "batchSize": 32, "learningRate": 0.05, **place}


@pytest.fixture
def writes(monkeypatch):
    """Records the shard folders that a test writes, in order."""
    seen: list[str] = []

    def write(df: Any, uri: str, **options: Any) -> Any:
        seen.append(uri)
        return write_shards(df, uri, **options)

    monkeypatch.setattr(fit_data, "write_shards", write)
    return seen


ONCE = {
    "check_names": "training/check/driver.py",
    "check_columns": "training/check/data.py",
    "check_training": "training/check/driver.py",
    "check_schema": "training/check/schema.py",
    "expand_arguments": "training/arguments.py",
    "make_heads": "training/make_heads.py",
}


def test_a_fit_runs_each_check_once(table, common, tmp_path):
    settings = common | {"epochs": 1, "metrics": ["accuracy"], "parallelism": {}}
    write_shards(table.select("features", "label"), str(tmp_path / "shards"))

    def count(run: Any) -> Counter[str]:
        """Returns how often each function of `ONCE` ran on this thread."""
        found: Counter[str] = Counter()

        def note(frame: FrameType, event: str, _: Any) -> None:
            file = ONCE.get(frame.f_code.co_qualname)
            if event == "call" and file is not None and frame.f_code.co_filename.endswith(f"/{file}"):
                found[frame.f_code.co_name] += 1

        sys.setprofile(note)
        try:
            run()
        finally:
            sys.setprofile(None)
        return found

    once = dict.fromkeys(ONCE, 1)
    assert count(lambda: TorchClassifier(**settings, validationFraction=0.2).fit(table)) == once
    # The shard column names are known only with the rows, so names are checked again then.
    on_shards = count(lambda: TorchClassifier(**settings).fitOnShards(str(tmp_path / "shards")))
    assert on_shards == once | {"check_names": 2}


@pytest.mark.slow
def test_many_parameter_maps_read_one_write(table, common, writes):
    estimator = TorchClassifier(**common)
    maps = [{estimator.learningRate: rate} for rate in (1e-6, 0.01, 0.05)]
    # Another label column needs another write.
    maps.append({estimator.labelCol: "target", estimator.loss: "MSELoss", estimator.epochs: 1})
    with pytest.raises(ValueError, match="'target' must hold whole class numbers"):
        estimator.fit(table, maps)
    assert len(writes) == 2
    models = estimator.fit(table, maps[:3])
    assert len(writes) == 3
    losses = [model.summary.epochs[-1].train_loss for model in models]
    assert losses[0] > losses[1] > losses[2]
    assert len({model.summary.run_uri for model in models}) == 3
    left = sorted(path.name.split("-")[0] for path in Path(common["storageUri"]).iterdir())
    assert left == ["run"] * 6, "models stay, data goes; of four maps three were fitted before"


def test_an_abandoned_search_leaves_no_data(table, common, writes):
    estimator = TorchClassifier(**common)
    models = estimator.fitMultiple(table, [{estimator.epochs: 1}, {estimator.epochs: 2}])
    index, model = next(models)
    assert (index, model.summary.steps) == (0, 8)
    assert Path(writes[0]).exists(), "the second map has not been fitted yet"
    del models
    assert not Path(writes[0]).exists()


@pytest.mark.slow
def test_cross_validation_writes_each_fold_once(table, common, writes):
    """Two fits of three workers each share four slots, so the second gang waits for the first."""
    estimator = TorchClassifier(**common, numWorkers=3)
    grid = ParamGridBuilder().addGrid(estimator.learningRate, [1e-7, 0.01, 0.05]).build()
    fitted = CrossValidator(
        estimator=estimator,
        estimatorParamMaps=grid,
        evaluator=BinaryClassificationEvaluator(),
        numFolds=2,
        seed=1,
        parallelism=2,
    ).fit(table)
    assert len(writes) == 2 + 1, "two folds, and the fit of the best on all rows"
    assert fitted.avgMetrics[2] > fitted.avgMetrics[0]
    assert not [path for path in Path(common["storageUri"]).iterdir() if path.name.startswith("shards")]


def meet_another_fit(folder: Path) -> Callback:
    """Returns a callback that waits in the first epoch until another fit trains, too."""

    def wait(state: TrainingState) -> None:
        if state.epoch == 1:
            (folder / uuid4().hex).touch()
            wait_for("another fit", lambda: len(list(folder.iterdir())) >= 2, 60.0)

    return Acts(epoch_end=wait)


@pytest.mark.slow
def test_train_validation_split_with_two_fits_at_a_time(table, common, tmp_path):
    (tmp_path / "fits").mkdir()
    estimator = TorchClassifier(**common, callbacks=[meet_another_fit(tmp_path / "fits")])
    grid = ParamGridBuilder().addGrid(estimator.learningRate, [1e-7, 0.05]).build()
    fitted = TrainValidationSplit(
        estimator=estimator,
        estimatorParamMaps=grid,
        evaluator=BinaryClassificationEvaluator(),
        seed=3,
        parallelism=2,
    ).fit(table)
    assert fitted.validationMetrics[1] > fitted.validationMetrics[0]


def test_a_fraction_is_held_out_by_the_seed(table, common):
    estimator = TorchClassifier(**common, validationFraction=0.25, metrics=["accuracy", "auroc"])
    first, second, other = (estimator.copy({estimator.seed: s}).fit(table).summary for s in (1, 1, 2))
    rows = first.epochs[0].rows
    assert 160 <= rows <= 200
    assert second.epochs[0].rows == rows
    columns = set(first.history.columns)
    assert {"validation_loss", "train_accuracy", "validation_accuracy", "validation_auroc"} <= columns
    assert first.history["validation_auroc"].iloc[-1] > 0.9
    assert other.epochs[0].validation_loss != first.epochs[0].validation_loss


def test_the_newest_rows_are_held_out_without_a_warning(table, common):
    """pytest raises each warning; `timeCol` used to be called useless once its rows were chosen."""
    estimator = TorchClassifier(**common | {"epochs": 1}, timeCol="id", validationFraction=0.25)
    assert estimator.fit(table).summary.rows == 180
    assert estimator.getTimeCol() == "id"


def test_nulls_are_left_out_where_asked_in_fit_and_transform(table, common):
    estimator = TorchClassifier(**common, inputCols=["holey", "broken"], handleInvalid="skip")
    estimator.setModel(of_two_numbers())
    model = estimator.fit(table)
    assert model.summary.rows == 2 * 192
    assert model.transform(table).count() == 192
    kept = model.copy({model.handleInvalid: "keep"}).transform(table)
    assert kept.count() == 240
    assert kept.where("prediction is null").count() == 48


def of_two_numbers() -> Net:
    return Net(lambda self, a, b: self.linear(torch.stack([a, b], dim=1)), linear=nn.Linear(2, 2))


@pytest.mark.modes
def test_several_labels_give_several_predictions(table, common):
    model = TorchEstimator(
        **common | {"model": two_heads(), "epochs": 6},
        labelCols=["label", "target"],
        loss=["CrossEntropyLoss", "huber"],
        lossWeights=[1.0, 2.0],
        predictionCols=["kind", "size"],
    ).fit(table)
    assert {"train_loss_label", "train_loss_target"} <= set(model.summary.history.columns)
    rows = model.transform(table).collect()
    inputs = torch.tensor([[row.a, row.b] for row in rows], dtype=torch.float32)
    kind, size = outputs_of(model.module(), inputs)
    np.testing.assert_allclose([row.kind for row in rows], kind, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose([row["size"] for row in rows], size[:, 0], rtol=1e-4, atol=1e-5)
    accuracy = np.mean([np.argmax(row.kind) == row.label for row in rows])
    assert accuracy > 0.8


def stop_in_the_second_epoch(state: TrainingState) -> None:
    if state.epoch == 2:
        state.stop("the user said so")


def fail(state: TrainingState) -> None:
    raise ZeroDivisionError("a bug in the callback")


@pytest.mark.modes
def test_callbacks_run_on_the_workers(table, common):
    changes = common | {"epochs": 9, "numWorkers": 2}
    model = TorchClassifier(**changes, callbacks=[Acts(epoch_end=stop_in_the_second_epoch)]).fit(table)
    assert len(model.summary.epochs) == 2
    assert model.summary.stop_reason == "the user said so"
    with pytest.raises(WorkerError, match=r"'callbacks, on_step_end, epoch 1': ZeroDivisionError: a bug in"):
        TorchClassifier(**changes, callbacks=Acts(step_end=fail)).fit(table)
    assert len(list(Path(common["storageUri"]).iterdir())) == 1, "the failed run is removed"


@pytest.mark.modes
def test_a_module_of_a_file_that_no_executor_can_import(table, common, tmp_path, monkeypatch):
    """The job's folder holds the class, which calls a function from a second file."""
    (tmp_path / "my_layers.py").write_text("def twice(x):\n    return 2 * x\n")
    (tmp_path / "my_network.py").write_text(
        "import my_layers\n"
        "from torch import nn\n"
        "class MyNetwork(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return my_layers.twice(super().forward(x))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import my_network

    try:
        model = TorchClassifier(**common | {"model": my_network.MyNetwork(2, 2)}, numWorkers=2).fit(table)
        assert model.transform(table).where("prediction = label").count() > 120
    finally:
        del sys.modules["my_network"], sys.modules["my_layers"]


def test_settings_without_effect_are_said(table, common, tmp_path):
    """test_settings.py has every case."""
    (text,) = _said(lambda: TorchClassifier(**common | {"epochs": 1}, minDelta=0.1).fit(table))
    assert text.startswith("minDelta has no effect: patience is not set")
    uri = str(tmp_path / "shards")
    write_shards(table.select("features", "label"), uri)
    assert not _said(lambda: TorchClassifier(**common).fitOnShards(uri))
    (text,) = _said(lambda: TorchClassifier(**common, validationFraction=0.5).fitOnShards(uri))
    assert text.startswith("validationFraction has no effect on fitOnShards")


def _said(function: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        function()
    return [str(warning.message) for warning in caught]


def test_the_model_is_not_the_users_module(table, common):
    module = Net(lambda self, x: self.sign * self.linear(x), linear=nn.Linear(2, 2), sign=1.0)
    model = TorchClassifier(**common | {"model": module}).fit(table)
    before = values_of(model.transform(table))
    module.sign = -1.0
    module.linear = nn.Linear(7, 7)
    assert values_of(model.transform(table)) == before
    assert model.module().sign == 1.0


def test_a_fitted_pipeline_is_saved_over_the_folder_above_its_storage(table, common, tmp_path):
    """Spark removes the folder, including the run, before it saves the model's weights."""
    common["storageUri"] = str(tmp_path / "shared" / "ringspark")
    fitted = Pipeline(stages=[TorchClassifier(**common)]).fit(table)
    before = values_of(fitted.transform(table))
    fitted.write().overwrite().save(str(tmp_path / "shared"))
    assert values_of(PipelineModel.load(str(tmp_path / "shared")).transform(table)) == before


def test_an_empty_name_of_a_column_that_may_be_missing_is_none(table, common):
    """Spark ML documents weightCol this way: if it is unset or empty, all rows weigh 1."""
    estimator = TorchClassifier(**common, validationFraction=0.5, weightCol="").setEpochs(1)
    # A parameter map bypasses the setters.
    model = estimator.fit(table, {estimator.validationIndicatorCol: ""})
    assert model.summary.history["validation_loss"].notna().all()


def test_names_are_found_as_the_session_compares_them(table, common):
    """Spark ML's own stages also accept featuresCol="Features"."""
    frame = table.selectExpr("features", "label", "1D as weight", "id < 40 as held")
    model = TorchClassifier(
        **common, featuresCol="Features", labelCol="LABEL", weightCol="WEIGHT", validationIndicatorCol="HELD"
    ).fit(frame)
    assert model.summary.rows == 2 * 200
    assert model.transform(frame).where("prediction is null").count() == 0


def test_columns_that_differ_in_case_only_are_two_where_the_session_says_so(table, common):
    frame = table.select("a", F.col("b").alias("A"), "label", F.lit(1.0).alias("Label"))
    settings = common | {"model": of_two_numbers(), "epochs": 1}
    with spark_conf(table.sparkSession, {"spark.sql.caseSensitive": "true"}):
        model = TorchClassifier(**settings, inputCols=["a", "A"], rawPredictionCol="Prediction").fit(frame)
        rows = model.transform(frame).select("a", "A", "Prediction", "prediction").collect()
        with pytest.raises(ValueError, match="labelCol 'LABEL' is not a column of the DataFrame"):
            TorchClassifier(**settings, inputCols=["a", "A"], labelCol="LABEL").fit(frame)
    module = model.module()
    inputs = [torch.tensor([row[i] for row in rows], dtype=torch.float32) for i in range(2)]
    logits = outputs_of(module, *inputs).numpy()
    np.testing.assert_allclose(logits, np.stack([row[2].toArray() for row in rows]), atol=1e-5)


def test_vectors_that_no_training_takes_are_shown_a_road_that_is_open(spark, common, tmp_path):
    rows = [(Vectors.sparse(1 << 17, [row], [1.0]), float(row)) for row in range(4)]
    frame = spark.createDataFrame(rows, ["features", "label"])
    with pytest.raises(ValueError, match=r"sparse vectors of size 131072, .* keep them sparse with columns="):
        TorchRegressor(**common).fit(frame)
    uri = str(tmp_path / "shards")
    write_shards(frame, uri, columns={"features": Sparse()})
    with pytest.raises(ValueError, match=r"cannot take .*features.indices .* features.indptr "):
        TorchRegressor(**common).fitOnShards(uri)
    widest = TorchRegressor(**common | {"model": nn.EmbeddingBag(1 << 17, 1, mode="sum")})
    assert widest.fitOnShards(uri).summary.rows == 4 * common["epochs"]


def test_state_that_no_checkpoint_holds_is_told(table, common):
    def count(self, x):
        if self.training:
            self.seen += 1
        return self.linear(x)

    counts = Net(count, linear=nn.Linear(2, 2))
    counts.register_buffer("seen", torch.zeros(()), persistent=False)
    (text,) = _said(lambda: TorchClassifier(**common | {"model": counts}).fit(table))
    told = "training changed the buffers ['seen'], which are registered with persistent=False"
    assert text.startswith(told)


def test_a_label_that_the_loss_ignores_is_no_class(table, common):
    frame = table.withColumn("label", F.when(F.col("id") % 5 == 0, -100.0).otherwise(F.col("label")))
    model = TorchClassifier(**common | {"epochs": 6}, loss=nn.CrossEntropyLoss(), metrics=["accuracy"]).fit(
        frame
    )
    rows = model.transform(frame).where("label >= 0").collect()
    assert np.mean([row.prediction == row.label for row in rows]) > 0.9
    assert model.summary.history["train_accuracy"].iloc[-1] > 0.85
    with pytest.raises(ValueError, match=r"labelCol 'label' must lie in 0..1 .* got -100..1"):
        TorchClassifier(**common, loss=nn.CrossEntropyLoss(ignore_index=-1)).fit(frame)
