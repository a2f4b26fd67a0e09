"""`OptunaSearch` in a real session: trials on gangs, one write, pruning, resume, saving, error messages."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd
import pytest
import torch
from parity import assert_equal_weights
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import BinaryClassificationEvaluator
from pyspark.ml.functions import array_to_vector
from pyspark.sql import functions as F
from spark_tables import no_job

from ringspark.estimators import Callback, TorchClassifier, TorchRegressor, TrainingState
from ringspark.estimators.checked_fit import CheckedFit
from ringspark.estimators.stages import fit_data
from ringspark.extras.search import Choice, IntRange, OptunaSearch, PopulationSearch, SearchModel, Uniform
from ringspark.extras.search.saved_search import load_part
from ringspark.extras.search.trial_data import TrialData
from ringspark.extras.tables import table_fit
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest, write_shards

optuna = pytest.importorskip("optuna")

pytestmark = pytest.mark.spark

MLP = ModelSpec("mlp", {"in_features": 2, "hidden": [8], "out_features": 2})
SPACE = {
    "learningRate": Uniform(1e-3, 1.0, log=True),
    "batchSize": IntRange(16, 64, step=16),
    "model.hidden": Choice([[4], [8, 8]]),
}
RATE = {"learningRate": Uniform(0.01, 0.1)}


@pytest.fixture(scope="module")
def table(spark: Any) -> Any:
    return small_table(spark)


def small_table(spark: Any) -> Any:
    """Returns 240 rows of two numbers and a class, with a fifth held out; the same bytes in every session."""
    columns = "id", "sin(id) as a", "cos(1.7 * id) as b", "id % 5 = 0 as held"
    plain = spark.range(0, 240, 1, 2).selectExpr(*columns)
    features = array_to_vector(F.array("a", "b")).alias("features")
    return plain.select("*", features, F.expr("cast(a + b > 0 as double) as label"))


def estimator(folder: Path, **params: Any) -> TorchClassifier:
    given = {"model": MLP, "epochs": 3, "batchSize": 32, "metrics": ["auroc"]}
    given |= {"validationIndicatorCol": "held", "storageUri": str(folder), "showProgress": False}
    return TorchClassifier(**given | params)


@pytest.fixture(scope="module")
def found(table: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[OptunaSearch, SearchModel, Path]:
    folder = tmp_path_factory.mktemp("search")
    with mock.patch.object(fit_data, "write_shards", wraps=write_shards) as write:
        settings = {"monitor": "validation_auroc", "numTrials": 4, "parallelism": 2, "seed": 7}
        search = OptunaSearch(estimator=estimator(folder), space=SPACE, **settings)
        model = search.fit(table)
    assert write.call_count == 1, "all trials read one write"
    return search, model, folder


def test_the_best_trial_is_the_model(found: Any, table: Any) -> None:
    _, model, folder = found
    trials = model.trials
    assert list(trials["number"]) == list(range(4))
    done = trials[trials["state"] == "complete"]
    best = done.loc[done["value"].idxmax()]
    assert model.bestParams["learningRate"] == best["learningRate"]
    assert model.bestModel.getModel().kwargs["hidden"] == model.bestParams["model.hidden"]
    history = model.bestModel.summary.history
    assert best["value"] == history["validation_auroc"].iloc[-1]
    assert best["epochs"] == len(history) == 3
    assert "prediction" in model.transform(table).columns
    assert [path.name.split("-")[0] for path in folder.iterdir()] == ["run"], "only the best one is kept"


@pytest.mark.slow
def test_a_search_and_its_result_are_saved_without_pickle(found: Any, table: Any, tmp_path: Path) -> None:
    search, model, _ = found
    search.copy({search.evaluator: BinaryClassificationEvaluator()}).save(str(tmp_path / "search"))
    model.save(str(tmp_path / "model"))
    assert not list(tmp_path.rglob("objects.pkl"))
    again = OptunaSearch.load(str(tmp_path / "search"))
    assert again.getSpace() == SPACE
    assert again.getEstimator().getModel() == MLP
    assert again.getEvaluator().getMetricName() == "areaUnderROC"
    assert again.getNumTrials() == 4
    loaded = SearchModel.load(str(tmp_path / "model"))
    pd.testing.assert_frame_equal(loaded.trials, model.trials)
    assert loaded.bestParams == model.bestParams
    expected = model.transform(table).select("id", "probability").collect()
    assert loaded.transform(table).select("id", "probability").collect() == expected
    PipelineModel([model]).write().overwrite().save(str(tmp_path / "pipeline"))
    (stage,) = PipelineModel.load(str(tmp_path / "pipeline")).stages
    assert stage.bestParams == model.bestParams


MISTAKES = {
    OptunaSearch: [
        ({"space": {"learningrate": Uniform(0, 1)}}, "not a Param of TorchClassifier; did you mean"),
        ({"space": {"learningRate": Uniform(0, 1)}}, "learningRate must be above 0 and finite, got 0.0"),
        ({"space": {"epochs": Choice([1, "two"])}}, "epochs must be a whole number, got 'two'"),
        ({"space": {"model.width": Choice([1])}}, "model 'mlp' does not take these arguments: .*'width'"),
        ({"space": {"runUri": Choice(["a"])}}, "space must not hold 'runUri'"),
        ({"pruner": "medan"}, "pruner must be one of .* got 'medan'; did you mean 'median'"),
        ({"sampler": 3}, "sampler must be a name or an optuna sampler, got 3"),
        ({"monitor": "validation_auc"}, "monitor 'validation_auc' is no entry of this training's history"),
        ({"runUri": "s3://bucket/search"}, "runUri of a search must be on a disk"),
        ({"estimator": BinaryClassificationEvaluator}, "estimator must be an estimator"),
        ({"space": None}, "OptunaSearch needs a space"),
        ({"space": {"learningRate": 0.1}}, "space must give 'learningRate' a range"),
        ({"model": None, "metrics": ["mae"]}, "metrics of a classification must be among"),
    ],
    PopulationSearch: [
        ({"space": {"weightDecay": Uniform(0, 1)}}, "only hold learningRate, maxGradNorm, or .* got 'weig"),
        ({"space": {"model.hidden": Choice([[4], [8]])}}, "change the shapes of the network's weights"),
        ({"space": {"batchSize": Choice([8])}}, "OptunaSearch"),
        ({"space": lambda trial: {}}, "must be a dict from Params to ranges, got a callable"),
        ({"population": 1}, "population must be at least 2"),
        ({"quantile": 0.6}, "quantile must be above 0 and at most 0.5, got 0.6"),
        ({"perturbation": 1.0}, "perturbation must be above 1 and finite, got 1.0"),
        ({"keep": "best"}, "must keep the last epoch; set keep='last' and"),
        ({"optimizer": torch.optim.SGD}, "the optimizer's factory sets"),
        ({"model": None, "metrics": ["mae"]}, "metrics of a classification must be among"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "params", "sentence"), [(kind, *case) for kind in MISTAKES for case in MISTAKES[kind]]
)
def test_a_mistake_costs_nothing(spark, table, tmp_path: Path, kind: Any, params: Any, sentence: str) -> None:
    trained = {name: params[name] for name in params if name in ("keep", "optimizer", "model", "metrics")}
    given = {"estimator": estimator(tmp_path, **trained), "space": RATE}
    given |= {name: params[name] for name in params if name not in trained}
    # The entries of a history are known after a look at the rows.
    jobless = nullcontext() if "monitor" in params else no_job(spark)
    with jobless, pytest.raises((ValueError, TypeError), match=sentence):
        kind(**given).fit(table)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "names", "told"),
    [
        (OptunaSearch, ["owner.json", "shards/part-0.parquet"], r"owner\.json"),
        (OptunaSearch, ["owner.json", "run.json", "shards-0123456789ab/manifest.json"], r"run\.json"),
        (OptunaSearch, ["owner.json", "population.json"], r"population\.json"),
        (PopulationSearch, ["owner.json", "run.json", "round-0"], r"run\.json"),
        (PopulationSearch, ["journal.log", "owner.json"], r"journal\.log"),
    ],
)
def test_a_used_folder_is_refused(table: Any, tmp_path: Path, kind: Any, names: Any, told: str) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    search = kind(estimator=estimator(tmp_path), space=RATE, runUri=str(tmp_path))
    with pytest.raises(ValueError, match=f"a search by {kind.__name__}, but .* holds '{told}'; set another"):
        search.fit(table)
    assert sorted(tmp_path.rglob("*")) == before


def test_no_pruner_is_no_pruning_and_not_the_default() -> None:
    assert OptunaSearch().getPruner() == "median"
    assert OptunaSearch(pruner=None).getPruner() == OptunaSearch().setPruner(None).getPruner() == "none"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Uniform(2, 1), "low of Uniform must not exceed high, got low 2 and high 1"),
        (lambda: Uniform(0, 1, log=True), "low of Uniform must be above 0 with log=True"),
        (lambda: IntRange(1, 8, log=True, step=2), "takes log or step, not both"),
        (lambda: IntRange(0.5, 2), "low of IntRange must be a whole number, got 0.5"),  # type: ignore[arg-type]
        (lambda: Choice("adam"), "Choice takes a list"),
    ],
)
def test_a_range_refuses_what_it_cannot_draw(make: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


def test_choices_that_optuna_cannot_record_keep_their_types() -> None:
    values = [[8], [8, 8], None, 1, True, 1.0, MLP]
    choice = Choice(values)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    drawn = [choice.suggest(study.ask(), "x") for _ in range(60)]
    assert {repr(value) for value in drawn} == {repr(value) for value in values}


def test_without_optuna_a_sentence_says_what_to_install(table: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    search = OptunaSearch(estimator=estimator(tmp_path), space=SPACE)
    with pytest.raises(ValueError, match=re.escape("pip install 'ringspark[search]'")):
        search.fit(table)


class Paced(Callback):
    """Makes epochs slow, and writes a file per start of rank 0."""

    def __init__(self, folder: str) -> None:
        Path(folder).mkdir(exist_ok=True)
        self._folder = folder

    def on_epoch_end(self, state: TrainingState) -> None:
        time.sleep(0.1)
        if state.rank == 0:
            rate = state.optimizer.param_groups[0]["lr"]
            Path(self._folder, f"{rate:g}-{state.epoch}").touch()


class WaitsForTheNextTrial(Paced):
    """Keeps the trial of rate 0.1 running until the trial of rate 0.2 has begun."""

    def on_epoch_end(self, state: TrainingState) -> None:
        super().on_epoch_end(state)
        rate = state.optimizer.param_groups[0]["lr"]
        if state.rank != 0 or rate != 0.1 or state.epoch < 20:
            return
        ends = time.monotonic() + 120
        while not list(Path(self._folder).glob("0.2-*")):
            if time.monotonic() > ends:
                raise RuntimeError("the slots of the pruned trial did not become free")
            time.sleep(0.1)


@pytest.mark.slow
def test_the_next_trial_starts_on_the_slots_of_a_pruned_one(table: Any, tmp_path: Path) -> None:
    # Two gangs use the session's four slots.
    gang = {"numWorkers": 2, "collective": "torch", "callbacks": [WaitsForTheNextTrial(str(tmp_path / "e"))]}
    trainer = estimator(tmp_path / "runs", epochs=24, **gang)
    space = lambda trial: {trainer.learningRate: [0.1, 1e-9, 0.2][trial.number]}  # noqa: E731
    pruner = optuna.pruners.ThresholdPruner(lower=0.9, n_warmup_steps=5)
    settings = {"monitor": "validation_auroc", "numTrials": 3, "parallelism": 2, "pruner": pruner}
    search = OptunaSearch(estimator=trainer, space=space, **settings)
    trials = search.fit(table).trials
    assert list(trials["state"]) == ["complete", "pruned", "complete"]
    assert list(trials["epochs"]) == [24, 5, 24]


@pytest.mark.slow
def test_a_trial_that_fails_is_counted_and_the_search_goes_on(table: Any, tmp_path: Path) -> None:
    trainer = estimator(tmp_path, optimizer="sgd", onNonFinite="stop")
    space = lambda trial: {trainer.learningRate: [0.1, 1e30, 0.2][trial.number]}  # noqa: E731
    search = OptunaSearch(estimator=trainer, space=space, numTrials=3, pruner="none")
    model = search.fit(table)
    assert list(model.trials["state"]) == ["complete", "failed", "complete"]
    assert "is not finite" in model.trials["reason"][1] or "FloatingPointError" in model.trials["reason"][1]
    assert model.bestParams["learningRate"] in (0.1, 0.2)
    hopeless = search.copy({search.space: lambda trial: {trainer.learningRate: 1e30}, search.numTrials: 2})
    with pytest.raises(RuntimeError, match="none of the search's trials has finished; the last one failed: "):
        hopeless.fit(table)


class Breaks(BinaryClassificationEvaluator):
    calls = 0

    def _evaluate(self, dataset: Any) -> float:
        Breaks.calls += 1
        if Breaks.calls == 2:
            raise RuntimeError("on purpose")
        return 0.5


def test_a_search_that_fails_leaves_no_folders(table: Any, tmp_path: Path) -> None:
    trainer = estimator(tmp_path, epochs=1)
    search = OptunaSearch(estimator=trainer, space=SPACE, numTrials=3, evaluator=Breaks(), parallelism=1)
    with pytest.raises(RuntimeError, match="on purpose"):
        search.fit(table)
    assert [path.name for path in tmp_path.iterdir()] == []


def test_two_drivers_of_a_search_keep_each_other_s_rows(table: Any, tmp_path: Path) -> None:
    data = CheckedFit.of(estimator(tmp_path), table).data
    run = tmp_path / "run"
    run.mkdir()
    digest = Path(TrialData(table, str(run)).manifest(data).uri).name
    # Another driver compares its rows, or writes the rows of another fit.
    shutil.copytree(run / digest, run / f"{digest}-0123456789ab")
    TrialData(table, str(run)).manifest(data)
    assert sorted(path.name for path in run.iterdir()) == [digest, f"{digest}-0123456789ab"]
    (run / digest / "manifest.json").unlink()
    (written,) = (run / digest).iterdir()
    TrialData(table, str(run)).manifest(data)
    assert written.exists()


@pytest.mark.slow
def test_an_evaluator_judges_rows_that_no_trial_trained_on(table: Any, tmp_path: Path) -> None:
    # The trial's fraction uses the search's seed, but is sampled from the remaining rows.
    trainer = estimator(tmp_path, seed=3, validationFraction=0.25)
    trainer.clear(trainer.validationIndicatorCol)
    space = {"learningRate": Uniform(1e-3, 1e-1, log=True)}
    settings = {"evaluator": BinaryClassificationEvaluator(), "numTrials": 2, "trainRatio": 0.6, "seed": 3}
    search = OptunaSearch(estimator=trainer, space=space, **settings)
    model = Pipeline(stages=[search]).fit(table).stages[0]
    with search._split(table, CheckedFit.of(trainer, table)) as parts:
        kept = [{row.id for row in part.collect()} for part in parts]
        # This holds even if Spark returns the rows in another order.
        with search._split(table.repartition(5, "a"), CheckedFit.of(trainer, table)) as again:
            assert [{row.id for row in part.collect()} for part in again] == kept
    assert not kept[0] & kept[1]
    assert kept[0] | kept[1] == set(range(240))
    assert 0.25 * 240 < len(kept[1]) < 0.55 * 240
    rows = model.bestModel.summary.epochs[0].rows
    assert 0.55 * len(kept[0]) < rows < 0.95 * len(kept[0])
    held_out = parts[1]
    value = search.getEvaluator().evaluate(model.transform(held_out))
    assert value == pytest.approx(model.trials["value"].max(), abs=1e-12)


def test_an_evaluator_judges_the_rows_of_any_indicator_that_fit_takes(table: Any, tmp_path: Path) -> None:
    frame = table.withColumn("is.held", F.col("held").cast("int"))
    trainer = estimator(tmp_path, validationIndicatorCol="is.held")
    search = OptunaSearch(estimator=trainer, evaluator=BinaryClassificationEvaluator())
    with search._split(frame, CheckedFit.of(trainer, frame)) as (training, held_out):
        assert training.count() == 240
        assert {row.id for row in held_out.collect()} == set(range(0, 240, 5))


SEARCH = {"space": SPACE, "monitor": "validation_loss", "numTrials": 6, "pruner": "hyperband", "seed": 1}

KILLED_DRIVER = """
import sys
from importlib import import_module
from pathlib import Path
from pyspark.sql import SparkSession
from ringspark.extras import search
from tests.extras.search.test_search import Paced, estimator, small_table

folder, kind, module = Path(sys.argv[1]), getattr(search, sys.argv[2]), import_module(sys.argv[3])
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
trainer = estimator(folder / "store", callbacks=[Paced(str(folder / "epochs"))], epochs=4)
kind(estimator=trainer, runUri=str(folder / "search"), **module.SEARCH).fit(small_table(spark))
"""


def kill_a_search(folder: Path, kind: str, module: str, until: str) -> Path:
    """Kills the driver of a search when the file `until` exists in its folder; returns the folder."""
    command = [sys.executable, "-c", KILLED_DRIVER, str(folder), kind, f"tests.extras.search.{module}"]
    path = os.pathsep.join([str(Path(__file__).parents[3]), *sys.path])
    driver = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path})
    try:
        while not (folder / "search" / until).exists():
            assert driver.poll() is None
            time.sleep(0.05)
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    return folder / "search"


def assert_same_search(*models: SearchModel) -> None:
    """Compares the trials, without their seconds, and the best weights; bit for bit."""
    trials = (model.trials.drop(columns="seconds") for model in models)
    pd.testing.assert_frame_equal(*trials, check_exact=True)
    assert_equal_weights(*(model.bestModel for model in models))


@pytest.mark.slow
def test_a_killed_search_goes_on_to_the_trials_of_an_undisturbed_one(table: Any, tmp_path: Path) -> None:
    trainer = estimator(tmp_path / "store", epochs=4, callbacks=[Paced(str(tmp_path / "epochs"))])
    expected = OptunaSearch(estimator=trainer, **SEARCH).fit(table)
    assert_same_search(OptunaSearch(estimator=trainer, **SEARCH).fit(table), expected)
    folder = kill_a_search(tmp_path, "OptunaSearch", "test_search", "trials/2/history.json")
    file = optuna.storages.journal.JournalFileBackend(str(folder / "journal.log"))
    study = optuna.load_study(study_name=None, storage=optuna.storages.JournalStorage(file))
    assert [trial.state.name for trial in study.trials][-1] == "RUNNING"
    search = OptunaSearch(estimator=trainer, runUri=str(folder), **SEARCH)
    resumed = search.fit(table)
    assert_same_search(resumed, expected)
    # A finished search trains nothing, and returns the same model.
    once_more = search.fit(table)
    pd.testing.assert_frame_equal(once_more.trials, resumed.trials, check_exact=True)
    more = search.copy({search.numTrials: 7}).fit(table)
    assert len(more.trials) == 7
    with pytest.raises(ValueError, match=r"its settings differ: seed: 1 -> 2; restore them"):
        search.copy({search.seed: 2}).fit(table)
    with pytest.raises(ValueError, match=r"its data differ: train rows: 192 -> 191"):
        search.fit(table.where("id > 1"))


SMALL = ModelSpec("tabpack", {"dropouts": [0.0, 0.2], "rates": [1.0, 0.5], "width": 8, "depth": 1})


def columns_of_a_table(spark: Any) -> Any:
    """Returns 240 rows of inputs, a time and a class; no indicator and no array of features."""
    return small_table(spark).selectExpr("a", "b", "id % 7 AS day", "if(label > 0, 'yes', 'no') AS label")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:left out of the table:UserWarning")
def test_trials_on_a_table_share_rows_and_one_plan(spark: Any, tmp_path: Path, monkeypatch: Any) -> None:
    frame = columns_of_a_table(spark)
    given = {"storageUri": str(tmp_path / "store"), "showProgress": False}
    plain = TorchClassifier(labelCol="label", timeCol="day", model=SMALL, **given)
    choices = {"epochs": [2, 3], "batchSize": [16, 32], "seed": [1, 2], "model.width": [4, 8]}
    given = {"space": {name: Choice(values) for name, values in choices.items()}, "numTrials": 2, "seed": 1}
    search = OptunaSearch(estimator=plain, **given, pruner="none", runUri=str(tmp_path / "search"))
    model = search.fit(frame)
    assert list(model.trials["state"]) == ["complete"] * 2
    (shards,) = (tmp_path / "search").glob("shards-*")  # all trials read one write
    assert ShardManifest.load(str(shards)).select("validation").num_rows == frame.where("day = 6").count()
    best = model.bestModel
    assert best.getModel().kwargs["width"] == model.bestParams["model.width"]
    assert len(best.summary.history) == model.bestParams["epochs"]
    assert list(best.summary.columns["column"]) == ["a", "b", "day"]
    assert {"prediction", "predictedLabel"} <= set(model.transform(frame).columns)
    # A resumed search reads the plan, and does not plan again.
    monkeypatch.setattr(table_fit, "plan_table", None)
    again = search.copy({search.numTrials: 3}).fit(frame)
    pd.testing.assert_frame_equal(again.trials[:2], model.trials, check_exact=True)
    with pytest.raises(ValueError, match="must not hold 'timeCol': all trials share the rows"):
        search.copy({search.space: {"timeCol": Choice(["a", "b"])}}).fit(frame)


@pytest.mark.slow
def test_networks_for_tables_compete_on_rows_that_none_trained_on(spark: Any, tmp_path: Path) -> None:
    frame = columns_of_a_table(spark).withColumn("label", F.expr("double(label = 'yes')"))
    plain = TorchClassifier(labelCol="label", epochs=2, storageUri=str(tmp_path), showProgress=False)
    space = lambda trial: {"model": [SMALL, ModelSpec("tabm", {"width": 8})][trial.number]}  # noqa: E731
    settings = {"evaluator": BinaryClassificationEvaluator(), "numTrials": 2, "pruner": "none"}
    search = OptunaSearch(estimator=plain, space=space, **settings)
    model = search.fit(frame)
    assert list(model.trials["state"]) == ["complete"] * 2
    assert 0.0 < model.trials["value"].max() <= 1.0
    assert model.transform(frame).count() == 240
    refused = search.copy({search.space: {"model": Choice([MLP])}})
    with pytest.raises(ValueError, match="model must be a ModelSpec of 'tabpack' or 'tabm' for a table"):
        refused.fit(frame)


CODE = """
import pathlib
pathlib.Path({marker!r}).touch()
class Net:
    load = staticmethod(lambda path: path)
"""


@pytest.mark.parametrize(
    "named",
    [
        "evil.Net",
        "pyspark.ml.pipeline.PipelineModel",
        "org.apache.spark.ml.PipelineModel",
        "ringspark.estimators.stages.persistence.json",
    ],
)
def test_a_saved_part_of_another_class_is_not_imported(tmp_path: Path, monkeypatch: Any, named: str) -> None:
    (tmp_path / "evil.py").write_text(CODE.format(marker=str(tmp_path / "ran")))
    monkeypatch.syspath_prepend(str(tmp_path))
    metadata = tmp_path / "best-model" / "metadata"
    metadata.mkdir(parents=True)
    text = {"class": named, "uid": "x", "sparkVersion": "4.0.0", "paramMap": {}, "defaultParamMap": {}}
    (metadata / "part-00000").write_text(json.dumps(text))
    with pytest.raises(ValueError, match=f"names the class '{named}', .* set RINGSPARK_ALLOW_PICKLE=1"):
        load_part(str(tmp_path), "best-model")
    assert not (tmp_path / "ran").exists()
    if named == "evil.Net":
        monkeypatch.setenv("RINGSPARK_ALLOW_PICKLE", "1")
        assert load_part(str(tmp_path), "best-model").endswith("best-model")
        del sys.modules["evil"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # MLflow's libraries warn about each other's next versions
def test_trials_are_runs_below_the_run_of_mlflow_that_was_active_at_fit(spark: Any, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.create_experiment("e", artifact_location=(tmp_path / "artifacts").as_uri())
    given = {"model": ModelSpec("mlp", {"in_features": 1, "hidden": [], "out_features": 1})}
    given |= {"featuresCol": "x", "labelCol": "y", "storageUri": str(tmp_path / "store")}
    tracking = [{"name": "mlflow", "tracking_uri": uri, "log_model": False}]
    trainer = TorchRegressor(**given, showProgress=False, tracking=tracking)
    search = OptunaSearch(estimator=trainer, space=RATE, numTrials=2, parallelism=2, pruner="none")
    frame = spark.range(64).selectExpr("array(cast(id as float)) as x", "cast(id % 3 as double) as y")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(uri)
    try:
        with mlflow.start_run(experiment_id=experiment) as parent:
            model = search.fit(frame)
    finally:
        mlflow.set_tracking_uri(before)
    runs = [run for run in client.search_runs([experiment]) if run.info.run_id != parent.info.run_id]
    assert [run.data.tags["mlflow.parentRunId"] for run in runs] == [parent.info.run_id] * 2
    rates = {float(run.data.params["learningRate"]) for run in runs}
    assert rates == set(model.trials["learningRate"])
