"""Searches and folds put each row on one side, also if the rows change between two jobs."""

from types import SimpleNamespace
from typing import Any

import pytest
from changing_frames import CHANGING, ROWS

from ringspark.estimators import TorchRegressor
from ringspark.extras.search import OptunaSearch
from ringspark.extras.tuning import fold_pairs, grouped_folds, stratified_folds, time_folds

pytestmark = [pytest.mark.spark, pytest.mark.modes]

# A search needs these of a checked fit to split the rows.
FIT: Any = SimpleNamespace(data=SimpleNamespace(validation_col=None, place="copy", columns=("x",)))
RUNS = [1, pytest.param(20, marks=pytest.mark.slow)]


def ids(frame: Any) -> list[int]:
    return sorted(row["id"] for row in frame.select("id", "x").collect())


def check(train: Any, held: Any, wanted: list[int]) -> None:
    left, right = ids(train), ids(held)
    assert left, "no training rows"
    assert right, "no held-out rows"
    both, none = set(left) & set(right), set(wanted) - set(left) - set(right)
    assert (len(both), len(none)) == (0, 0)
    assert sorted(left + right) == wanted


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("kind", CHANGING)
def test_a_search_holds_each_row_out_or_trains_on_it(spark: Any, kind: str, runs: int) -> None:
    from pyspark.ml.evaluation import RegressionEvaluator

    for seed in range(runs):
        search = OptunaSearch(estimator=TorchRegressor(), evaluator=RegressionEvaluator(), seed=seed)
        with search._split(CHANGING[kind](spark), FIT) as parts:
            check(*parts, list(range(ROWS)))


@pytest.mark.telling
@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("kind", CHANGING)
def test_each_row_has_one_fold(spark: Any, kind: str, runs: int) -> None:
    for seed in range(runs):
        rows = CHANGING[kind](spark).selectExpr("id", "x", "id % 3 AS label", "id % 40 AS owner")
        folds = stratified_folds(rows, "label", 2, seed)
        for number in range(2):
            check(folds.where(f"fold != {number}"), folds.where(f"fold = {number}"), list(range(ROWS)))
        for train, held in fold_pairs(grouped_folds(rows, "owner", 2, seed), 2):
            check(train, held, list(range(ROWS)))


@pytest.mark.parametrize("kind", CHANGING)
def test_folds_of_a_column_that_changes(spark: Any, kind: str) -> None:
    rows = CHANGING[kind](spark).selectExpr("id", "x", "CAST(floor(x * 1e9) % 3 AS int) AS fold")
    rows = rows.selectExpr("id", "x", "abs(fold) AS fold")
    for train, held in fold_pairs(rows, 3):
        check(train, held, list(range(ROWS)))
    # In each fold in time, the first rows train. The last rows train in no fold.
    blocks = [ids(held) for _, held in time_folds(rows, "x", 3)]
    assert len({number for block in blocks for number in block}) == sum(map(len, blocks))


def test_times_near_2_to_the_60_are_divided_evenly(spark: Any) -> None:
    rows = spark.range(0, 400, 1, 4).selectExpr("id + (1L << 60) AS at", "id", "0D AS x")
    sizes = [(len(ids(train)), len(ids(held))) for train, held in time_folds(rows, "at", 3)]
    assert sizes == [(100, 100), (200, 100), (300, 100)]
