"""`contributionsCol`: how much each column of a table adds to a prediction."""

from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.ml import Pipeline, PipelineModel
from pyspark.sql import functions as F
from torch import nn

from ringspark.estimators import TorchClassifier, TorchRegressor
from ringspark.estimators.inference.results import Classes, Results, Values
from ringspark.extras.serving.served_folder import write_served
from ringspark.extras.serving.served_model import ServedModel
from ringspark.extras.tables.contributions import ContributionResults, baseline_of, orders_of
from ringspark.extras.tables.tabm import TabM
from ringspark.models import ModelSpec
from ringspark.pipelines.kinds import TableColumn, TableRow

NUMBER: dict[str, Any] = {"counts": (1, 0)}
WORDS: dict[str, Any] = {"form": "words", "words": ("a", "b", "c"), "counts": (0, 1, 5, 2, 0)}
# Two parts of one column, a number that is an id, too, and a name.
KIND = TableRow(
    (
        TableColumn(name="pair", path=("x",), **NUMBER),
        TableColumn(name="code", center=1.0, **NUMBER),
        TableColumn(name="code", form="levels", levels=(1.0, 2.0, 3.0), counts=(0, 1, 1, 4, 0)),
        TableColumn(name="pair", path=("y",), **NUMBER),
        TableColumn(name="word", **WORDS),
        TableColumn(name="other", **NUMBER),
    )
)
EDGES = [np.linspace(-2, 2, 6).tolist()] * 4
ROWS = 64


def draw_rows(seed: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    numbers = torch.randn(ROWS, 4, generator=draw)
    numbers[numbers > 1.5] = np.nan
    return [numbers, torch.randint(0, 4, (ROWS, 2), generator=draw)]


def explain(network: nn.Module, inputs: list[torch.Tensor], own: Results) -> tuple[Any, Any]:
    """Returns the outputs, and contributions with the baseline's number at the end."""
    results = ContributionResults(base=own, own=own, kind=KIND, parts=(*KIND.suffixes, "")[: len(inputs)])
    with torch.no_grad(), results.forward(network.eval()) as forward:
        outputs, found = forward(inputs)
    return outputs.double().numpy(), found.numpy()


def tabm(outputs: int, seed: int = 0, **given: Any) -> TabM:
    torch.manual_seed(seed)
    network = TabM(EDGES, KIND.cardinalities, outputs, members=2, width=16, **given)
    for weights in network.parameters():
        weights.data *= 3  # strong interactions
    return network


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), outputs=st.integers(1, 4))
def test_contributions_add_up_to_the_prediction(seed: int, outputs: int) -> None:
    inputs = draw_rows(seed)
    logits, found = explain(tabm(outputs, seed), inputs, Classes(width=outputs))
    # The log-odds of class 1 of two, else of the predicted class.
    shares = Classes(width=outputs).probabilities(logits)
    wanted = shares[:, 1] if outputs < 3 else shares.max(1)
    np.testing.assert_allclose(1 / (1 + np.exp(-found.sum(1))), wanted, rtol=0, atol=1e-12)
    values, found = explain(tabm(1, seed, center=1e4, scale=7.0), inputs, Values(shapes=((1,),)))
    np.testing.assert_allclose(found.sum(1), values[:, 0], rtol=1e-12)


class Additive(nn.Module):
    """A sum of an offset and one effect per column; the pair's two numbers have an effect together."""

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        x, code, y, _ = numbers.nan_to_num(-3.0).unbind(1)
        numbers.zero_()  # networks may change their inputs
        return x * y + code.square() + 10.0 * ids[:, 0] - 5.0 * ids[:, 1] + offset


def test_an_additive_network_has_exact_effects_and_an_ignored_column_has_none() -> None:
    (numbers, ids), offset = draw_rows(1), torch.arange(float(ROWS))
    _, found = explain(Additive(), [numbers.clone(), ids, offset], Values(shapes=((),)))
    (x, code, y, _), (level, word) = numbers.nan_to_num(-3.0).double().unbind(1), ids.unbind(1)
    # The most frequent id is the number 3; the typical row has this number, medians of 0, and word "b".
    wanted = [x * y, code.square() - 4.0 + 10.0 * (level - 3), -5.0 * (word - 2), 0 * x]
    np.testing.assert_allclose(found[:, :-1], np.stack(wanted, 1), atol=1e-4)
    assert (found[:, 3] == 0).all()
    assert (found[:, -1] == 4.0 + 30.0 - 10.0 + offset.numpy()).all()
    assert KIND.sources == ["pair", "code", "word", "other"]


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_a_column_without_weights_gets_zero_and_equal_rows_get_equal_numbers(seed: int) -> None:
    network, inputs = tabm(3, seed), draw_rows(seed)
    place = 4 * (12 + 1) - 1  # the rank of the last number, after the numbers' embeddings
    network.blocks[0].linear.weight.data[:, [*range(36, 48), place]] = 0
    inputs = [torch.cat([values[:32], values[:32]]) for values in inputs]
    _, found = explain(network, inputs, Classes(width=3))
    assert (found[:, 3] == 0).all()
    assert (found[:, :3] != 0).any(0).all()
    np.testing.assert_allclose(found[:32], found[32:], rtol=1e-4, atol=1e-4)


def test_few_columns_have_exact_shapley_values_and_wide_tables_few_orders() -> None:
    assert sorted(orders_of(3)) == [list(order) for order in permutations(range(3))]
    for columns, orders in ((4, 8), (64, 8), (100, 4), (1_000, 2)):
        found = np.array(orders_of(columns))
        assert found.shape == (orders, columns)
        assert (np.sort(found) == np.arange(columns)).all()
        # Each order comes with its reverse, so each column stands in the middle on average.
        assert (found.argsort(1).mean(0) == (columns - 1) / 2).all()


def test_the_baseline_of_a_date_is_the_median_date() -> None:
    column = TableColumn(
        name="day",
        form="calendar",
        zone="Asia/Tokyo",
        center=12 * 3600.0,
        scale=1e5,
        parts=("hour",),
        **NUMBER,
    )
    numbers, ids = baseline_of(TableRow((column,)))
    assert numbers == pytest.approx([0.0, 0.0, 0.0, -1.0], abs=1e-6)  # the trend, and noon
    assert not len(ids)


SMALL = {"rates": [1.0, 0.5], "dropouts": [0.0, 0.2], "width": 8, "depth": 1, "number_width": 2}
FAST: dict[str, Any] = {"model": ModelSpec("tabpack", SMALL), "epochs": 1, "showProgress": False}


@pytest.fixture(scope="module")
def table(spark: Any) -> Any:
    return (
        spark.range(0, 300, 1, 2)
        .selectExpr(
            "sin(id) AS x", "IF(id % 9 = 0, NULL, id % 13) AS y", "concat('w', id % 5) AS word",
            "array(cos(id), id % 7) AS pair", "concat('c', int(id % 3)) AS kind", "sin(id) + id % 5 AS label",
        )
        .cache()
    )  # fmt: skip


def vectors(scored: Any, column: str = "why") -> Any:
    return np.array([row[0].toArray() for row in scored.select(column).collect()])


@pytest.mark.spark
@pytest.mark.modes
@pytest.mark.usefixtures("interpreter")
def test_fitted_and_saved_models_explain_their_predictions(table: Any, tmp_path: Path) -> None:
    # Each stage finds the other's column, so the order of the columns matters.
    stages = [
        TorchRegressor(
            contributionsCol="why", innerCols={"hidden": "hidden"}, inputCols=["word", "x", "pair"], **FAST
        ),
        TorchClassifier(
            contributionsCol="classWhy", labelCol="kind", predictionCol="class", inputCols=["y", "x"], **FAST
        ),
    ]
    model = Pipeline(stages=stages).fit(table)
    scored = model.transform(table).cache()
    found, predicted = vectors(scored), [row[0] for row in scored.select("prediction").collect()]
    assert model.stages[0].contributionColumns() == ["word", "x", "pair"]
    np.testing.assert_allclose(found.sum(1), predicted, rtol=1e-9)
    assert np.ptp(found[:, -1]) < 1e-5
    assert vectors(scored, "hidden").shape == (300, 2 * 8)
    probability = vectors(scored, "probability").max(1)
    wanted = np.log(probability / (1 - probability))
    np.testing.assert_allclose(vectors(scored, "classWhy").sum(1), wanted, rtol=1e-6)
    assert model.transform(table.limit(0)).schema == scored.schema
    model.write().overwrite().save(f"file:{tmp_path}/model")
    again = PipelineModel.load(f"file:{tmp_path}/model").transform(table)
    np.testing.assert_allclose(vectors(again), found, atol=1e-6)
    served = ServedModel(model.stages[0]).predict(table.toPandas())
    np.testing.assert_allclose(np.stack(served["why"]), found, atol=1e-6)
    np.testing.assert_allclose(np.stack(served["hidden"]), vectors(scored, "hidden"), atol=1e-5)
    with pytest.raises(ValueError, match="innerCols and contributionsCol need the whole stage"):
        write_served(model.stages[0], tmp_path / "served")
    # A row's contributions do not depend on the rows around it.
    few = model.transform(table.where("word = 'w3'").withColumn("x", F.col("x") + 0))
    np.testing.assert_allclose(vectors(few), vectors(scored.where("word = 'w3'")), atol=1e-5)
