"""Every stage of the package, with one entry per stage for the conformance suite.

`test_conformance.py` tests every stage listed in `STAGES`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from pyspark.ml.evaluation import Evaluator, MulticlassClassificationEvaluator, RegressionEvaluator
from pyspark.ml.functions import array_to_vector
from pyspark.sql import functions as F
from spark_stages import SPARK_STAGES_RUN, spark_saves, spark_stages

from ringspark.estimators import (
    TorchClassificationModel,
    TorchClassifier,
    TorchEstimator,
    TorchModel,
    TorchRegressionModel,
    TorchRegressor,
)
from ringspark.models import ModelSpec

__all__ = ["spark_saves", "spark_stages"]

ROWS = 96


class Accuracy(Evaluator):
    """Share of rows with a prediction within 1/2 of the label, for modes without Spark's evaluators."""

    def _evaluate(self, dataset: Any) -> float:
        hits = F.avg((F.abs(F.col("prediction") - F.col("label")) < 0.5).cast("double"))
        return float(dataset.select(hits).first()[0])


@dataclass(frozen=True, kw_only=True)
class StageCase:
    """An estimator, its model class, and settings for this suite's table."""

    estimator: type[Any]
    model: type[Any]
    network: ModelSpec
    evaluator: type[Any]
    evaluator_params: dict[str, Any] = field(default_factory=dict)

    def make(self, storage_uri: str, **params: Any) -> Any:
        """Returns an unfitted estimator with short, quiet fits."""
        common: dict[str, Any] = {
            "model": self.network,
            "epochs": 2,
            "batchSize": 32,
            "learningRate": 0.05,
            "storageUri": storage_uri,
            "showProgress": False,
        }
        return self.estimator(**common | params)

    def make_evaluator(self) -> Evaluator:
        """Returns Spark's evaluator for this task if Spark can run it here."""
        evaluator: Evaluator = self.evaluator(**self.evaluator_params) if SPARK_STAGES_RUN else Accuracy()
        return evaluator


CLASSES = ModelSpec("mlp", {"in_features": 2, "hidden": [8], "out_features": 2})
LINE = ModelSpec("linear", {"in_features": 2, "out_features": 1})
STAGES = [
    StageCase(
        estimator=TorchClassifier,
        model=TorchClassificationModel,
        network=CLASSES,
        evaluator=MulticlassClassificationEvaluator,
        evaluator_params={"metricName": "accuracy"},
    ),
    StageCase(
        estimator=TorchRegressor, model=TorchRegressionModel, network=LINE, evaluator=RegressionEvaluator
    ),
    StageCase(estimator=TorchEstimator, model=TorchModel, network=LINE, evaluator=RegressionEvaluator),
]


# One stage covers most failures; `make test-all` runs all stages.
CASES = [
    pytest.param(case, id=case.estimator.__name__, marks=[pytest.mark.slow] if number else [])
    for number, case in enumerate(STAGES)
]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> StageCase:
    """One stage of `STAGES` per run."""
    found: StageCase = request.param
    return found


@pytest.fixture
def listed() -> list[StageCase]:
    return STAGES


@pytest.fixture(scope="module")
def stage_storage(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder that the driver and the executors share."""
    return str(tmp_path_factory.mktemp("stages"))


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    """A table with two features, a label computed from them, and unrelated columns of many types."""
    plain = spark.range(0, ROWS, 1, 2).selectExpr("id", "sin(id) as a", "cos(1.7 * id) as b")
    return plain.select(
        "id",
        F.expr("concat('row ', id) as note"),
        F.expr("if(id % 3 = 0, null, id) as gap"),
        F.expr("cast(id as decimal(12, 3)) as price"),
        F.expr("timestamp_seconds(id) as seen"),
        F.expr("array(id, null, -id) as list"),
        F.expr("named_struct('x', id, 'y', named_struct('z', 'text')) as pair"),
        F.expr("map('key', id) as lookup"),
        F.expr("encode(concat('bytes ', id), 'utf-8') as bytes"),
        F.expr("id as `name.with dot`"),
        "a",
        "b",
        array_to_vector(F.array("a", "b")).alias("features"),
        F.expr("cast(a + b > 0 as double) as label"),
    )


@pytest.fixture(scope="module")
def estimator(case: StageCase, stage_storage: str) -> Any:
    """One estimator per stage; no test may change it."""
    return case.make(stage_storage)


@pytest.fixture(scope="module")
def fitted(estimator: Any, frame: Any) -> Any:
    """The fitted model, shared by tests that only read it."""
    return estimator.fit(frame)


@pytest.fixture(scope="module")
def scored(fitted: Any, frame: Any) -> list[Any]:
    """Predictions of `fitted` for every row, by id."""
    rows: list[Any] = fitted.transform(frame).orderBy("id").collect()
    return rows
