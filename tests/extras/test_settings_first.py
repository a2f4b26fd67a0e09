"""Searches and tuners refuse a wrong setting before their first Spark job, as `fit` does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from spark_tables import no_job

from ringspark.estimators import TorchClassifier
from ringspark.extras.search import Choice, OptunaSearch, PopulationSearch, Uniform
from ringspark.extras.tuning import batch_that_fits, lr_range_test

pytestmark = pytest.mark.spark

METRICS = "metrics of a classification must be among"
BAD = {"labelCol": "label", "epochs": 2, "metrics": ["mae"]}


def _search(kind: Any, space: dict[str, Any], **wrong: Any) -> Callable[[Any, Path], Any]:
    def run(rows: Any, folder: Path) -> Any:
        good = {"labelCol": "label", "epochs": 2}
        return kind(estimator=TorchClassifier(**(wrong or good)), space=space, runUri=str(folder)).fit(rows)

    return run


RATES = {"learningRate": Uniform(1e-4, 1e-1, log=True)}
RUNS: dict[str, tuple[Callable[[Any, Path], Any], str]] = {
    "batch_that_fits": (lambda rows, _: batch_that_fits(TorchClassifier(**BAD), rows), METRICS),
    "lr_range_test": (lambda rows, _: lr_range_test(TorchClassifier(**BAD), rows), METRICS),
    "OptunaSearch": (_search(OptunaSearch, RATES, **BAD), METRICS),
    "PopulationSearch": (_search(PopulationSearch, RATES, **BAD), METRICS),
    "a space's name": (_search(OptunaSearch, {"learningRat": Choice([1.0])}), "learningRate"),
    "a space's value": (_search(OptunaSearch, {"batchSize": Choice([0])}), "batchSize"),
    "a space that cannot change": (_search(PopulationSearch, {"batchSize": Choice([8])}), "OptunaSearch"),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_wrong_setting_costs_no_job_and_leaves_no_folder(spark: Any, tmp_path: Path, name: str) -> None:
    rows = spark.range(0, 200, 1, 2).selectExpr("id AS x", "id % 2 AS label")
    run, reason = RUNS[name]
    with no_job(spark), pytest.raises((ValueError, TypeError), match=reason):
        run(rows, tmp_path / "search")
    assert not list(tmp_path.iterdir())
