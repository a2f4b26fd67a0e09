"""`PopulationSearch` in a real session: copied members, resume and saving."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from parity import assert_equal_weights
from pyspark.ml.evaluation import BinaryClassificationEvaluator

from ringspark.estimators import AllReduce, TorchRegressor, Zero
from ringspark.extras.search import Choice, PopulationSearch, SearchModel, Uniform
from ringspark.models import ModelSpec
from tests.extras.search.test_search import (
    MLP,
    Paced,
    assert_same_search,
    estimator,
    kill_a_search,
    small_table,
)

pytestmark = pytest.mark.spark

RATES = {"learningRate": Uniform(1e-3, 1.0, log=True)}
SEARCH = {"space": RATES, "monitor": "validation_auroc", "population": 4, "seed": 1}


@pytest.fixture(scope="module")
def table(spark: Any) -> Any:
    return small_table(spark)


@pytest.mark.slow
@pytest.mark.parametrize("sync", [AllReduce(), Zero(stage=1)], ids=str)
def test_a_member_goes_on_as_if_it_had_never_paused(table: Any, tmp_path: Path, sync: Any) -> None:
    """All members are equal here, so each is one long training, copied or not."""
    given = {"model": ModelSpec("mlp", {**MLP.kwargs, "dropout": 0.2}), "epochs": 5, "optimizer": "adamw"}
    given |= {"lrSchedule": "one_cycle", "emaDecay": 0.9, "numWorkers": 2, "sync": sync}
    trainer = estimator(tmp_path, checkpointEverySeconds=0, **given)
    settings = {"space": {"learningRate": Choice([0.05])}, "population": 2, "epochsPerRound": 2}
    search = PopulationSearch(estimator=trainer, parallelism=2, **settings)
    model = search.fit(table)
    whole = trainer.copy({trainer.learningRate: 0.05}).fit(table)
    assert list(model.trials["epochs"]) == [2, 2, 4, 4, 5, 5]
    assert list(model.trials["copied_from"].dropna()) == [0, 0, 0, 0]
    columns = ["epoch", "train_loss", "validation_loss", "validation_auroc", "learning_rate"]
    histories = [m.summary.history[columns] for m in (model.bestModel, whole)]
    pd.testing.assert_frame_equal(*histories, check_exact=True)
    assert_equal_weights(model.bestModel, whole)
    assert model.bestModel.summary.steps == whole.summary.steps
    assert sorted(path.name.split("-")[0] for path in tmp_path.iterdir()) == ["run", "run"]


@pytest.mark.slow
def test_a_killed_search_goes_on_to_the_rounds_of_an_undisturbed_one(table: Any, tmp_path: Path) -> None:
    trainer = estimator(tmp_path / "store", epochs=4, callbacks=[Paced(str(tmp_path / "epochs"))])
    expected = PopulationSearch(estimator=trainer, **SEARCH).fit(table)
    until = "round-1/member-1/history.json"
    folder = kill_a_search(tmp_path, "PopulationSearch", "test_population_search", until)
    search = PopulationSearch(estimator=trainer, runUri=str(folder), **SEARCH)
    resumed = search.fit(table)
    assert_same_search(resumed, expected)
    # The history of the best member's rate includes the members from which it was copied.
    trials = resumed.trials.set_index(["round", "member"])
    last = trials.loc[3]
    member, rates = int(last["value"].idxmax()), []
    for number in range(3, -1, -1):
        rates.append(trials.loc[(number, member), "learningRate"])
        member = int(trials.loc[(number, member), "copied_from"]) if number else member
    np.testing.assert_allclose(resumed.bestModel.summary.history["learning_rate"], rates[::-1], rtol=1e-12)
    assert resumed.bestParams["learningRate"] == rates[0]
    assert resumed.bestModel.summary.history["validation_auroc"].iloc[-1] == last["value"].max()
    assert (trials["copied_from"].dropna() != trials.dropna().index.get_level_values("member")).sum() >= 3

    # A finished search trains nothing, and its result is saved without pickle.
    once_more = search.fit(table)
    pd.testing.assert_frame_equal(once_more.trials, resumed.trials, check_exact=True)
    kept = [path.name for path in folder.glob("round-*/*")]
    assert kept == [Path(once_more.bestModel.summary.run_uri).name]
    once_more.save(str(tmp_path / "model"))
    search.copy({trainer.callbacks: []}).save(str(tmp_path / "stage"))
    assert not list(tmp_path.glob("model/**/objects.pkl"))
    pd.testing.assert_frame_equal(SearchModel.load(str(tmp_path / "model")).trials, resumed.trials)
    assert PopulationSearch.load(str(tmp_path / "stage")).getSpace() == RATES
    with pytest.raises(ValueError, match=r"its settings differ: seed: 1 -> 2; restore them"):
        search.copy({search.seed: 2}).fit(table)
    with pytest.raises(ValueError, match=r"its settings differ: batchSize: 32 -> 16; restore them"):
        search.copy({trainer.batchSize: 16}).fit(table)


@pytest.mark.slow
def test_a_failed_member_is_replaced_and_an_evaluator_judges(table: Any, tmp_path: Path) -> None:
    trainer = estimator(tmp_path, optimizer="sgd", epochs=2)
    trainer.clear(trainer.validationIndicatorCol)
    settings = {"evaluator": BinaryClassificationEvaluator(), "population": 4, "parallelism": 2, "seed": 0}
    search = PopulationSearch(estimator=trainer, space={"learningRate": Choice([0.1, 1e30])}, **settings)
    model = search.fit(table)
    first = model.trials[model.trials["round"] == 0].set_index("member")
    assert set(first["state"]) == {"complete", "failed"}, "the seed draws both"
    assert (first["state"] == "failed").equals(first["learningRate"] == 1e30)
    second = model.trials[model.trials["round"] == 1].set_index("member")
    well = set(first.index[first["state"] == "complete"])
    assert set(second["copied_from"].astype(int)) <= well
    assert model.bestParams == {"learningRate": 0.1}
    hopeless = search.copy({search.space: {"learningRate": Choice([1e30])}})
    with pytest.raises(RuntimeError, match="the population failed in round 0; correct the error"):
        hopeless.fit(table)
    assert [path.name.split("-")[0] for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.slow
def test_members_on_a_table_without_a_model(spark: Any, tmp_path: Path) -> None:
    frame = small_table(spark).selectExpr("a", "b", "a - b AS label")
    plain = TorchRegressor(labelCol="label", epochs=3, storageUri=str(tmp_path), showProgress=False)
    search = PopulationSearch(estimator=plain, space=RATES, population=2, epochsPerRound=2, seed=1)
    model = search.fit(frame)
    assert list(model.trials["state"]) == ["complete"] * 4
    assert list(model.trials["epochs"]) == [2, 2, 3, 3]
    assert list(model.bestModel.summary.columns["column"]) == ["a", "b"]
    assert model.transform(frame).where("prediction IS NOT NULL").count() == 240
