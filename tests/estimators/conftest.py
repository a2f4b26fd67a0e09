"""Every public stage of the package, for the conformance suite `test_conformance.py`.

`STAGES` lists the stages that train, `EXTRA_STAGES` the stages of extras. The tests of Params, saving and
`transform` take both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
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
    text_param: str = "predictionCol"

    @property
    def stage(self) -> type[Any]:
        return self.estimator

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


@dataclass(frozen=True, kw_only=True)
class ExtraCase:
    """A stage of extras, which is imported when its tests run.

    Attributes:
        stage_path: `module:name` of the class.
        model_path: Class of the fitted model; "" for a Transformer.
        text_param: Param that tests set to any text.
        make_params: Returns Params for this suite's table; takes the folder for shards.
    """

    stage_path: str
    model_path: str = ""
    text_param: str
    make_params: Callable[[str], dict[str, Any]]

    @property
    def stage(self) -> type[Any]:
        return _load(self.stage_path)

    @property
    def model(self) -> type[Any] | None:
        return _load(self.model_path) if self.model_path else None

    def make(self, storage_uri: str, **params: Any) -> Any:
        """Returns the stage, not fitted."""
        return self.stage(**self.make_params(storage_uri) | params)


def _load(path: str) -> type[Any]:
    module, _, name = path.partition(":")
    kind: type[Any] = getattr(import_module(module), name)
    return kind


def _search_params(storage_uri: str) -> dict[str, Any]:
    from ringspark.extras.search import Uniform

    inner = STAGES[0].make(storage_uri, validationFraction=0.25)
    return {"estimator": inner, "space": {"learningRate": Uniform(1e-3, 1e-1, log=True)}, "seed": 3}


EXTRA_STAGES = [
    ExtraCase(
        stage_path="ringspark.extras.windows.sequence_windows:SequenceWindows",
        text_param="outputCol",
        make_params=lambda _: {
            "keyCols": [],
            "timeCol": "id",
            "valueCols": ["a", "b"],
            "steps": 3,
            "targetCol": "a",
            "outputCol": "window",
            "labelCol": "next_a",
        },
    ),
    ExtraCase(
        stage_path="ringspark.extras.search:OptunaSearch",
        model_path="ringspark.extras.search:SearchModel",
        text_param="monitor",
        make_params=lambda uri: _search_params(uri) | {"numTrials": 1},
    ),
    ExtraCase(
        stage_path="ringspark.extras.search:PopulationSearch",
        model_path="ringspark.extras.search:SearchModel",
        text_param="monitor",
        make_params=lambda uri: _search_params(uri) | {"population": 2, "epochsPerRound": 2},
    ),
    ExtraCase(
        stage_path="ringspark.extras.pretraining.autoencoder:TorchAutoencoder",
        model_path="ringspark.extras.pretraining.autoencoder:TorchAutoencoderModel",
        text_param="predictionCol",
        make_params=lambda uri: {
            "model": ModelSpec("linear", {"in_features": 2, "out_features": 2}),
            "epochs": 2,
            "storageUri": uri,
            "showProgress": False,
            "noise": 0.1,
        },
    ),
]

# One stage covers most failures; `make test-all` runs all stages.
CASES = [
    pytest.param(case, id=case.estimator.__name__, marks=[pytest.mark.slow] if number else [])
    for number, case in enumerate(STAGES)
]
EXTRA_CASES = [
    pytest.param(
        case,
        id=case.stage_path.rpartition(":")[2],
        marks=[pytest.mark.extras, pytest.mark.slow] if case.model_path else [pytest.mark.extras],
    )
    for case in EXTRA_STAGES
]


@pytest.fixture(scope="module", params=CASES)
def case(request):
    """One stage of `STAGES` per run."""
    found: StageCase = request.param
    return found


@pytest.fixture(scope="module", params=[*CASES, *EXTRA_CASES])
def any_case(request):
    """One stage of `STAGES` or `EXTRA_STAGES` per run."""
    found: StageCase | ExtraCase = request.param
    return found


@pytest.fixture
def listed():
    return [*STAGES, *EXTRA_STAGES]


@pytest.fixture(scope="module")
def stage_storage(tmp_path_factory):
    """A folder that the driver and the executors share."""
    return str(tmp_path_factory.mktemp("stages"))


@pytest.fixture(scope="module")
def frame(spark):
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
def made():
    """Stages by class."""
    return {}


@pytest.fixture(scope="module")
def fits():
    """Fitted models by the class of their estimator."""
    return {}


@pytest.fixture(scope="module")
def estimator(case, stage_storage, made):
    """One estimator per stage; no test may change it."""
    return made.setdefault(case.stage, case.make(stage_storage))


@pytest.fixture(scope="module")
def fitted(estimator, frame, fits):
    """The fitted model, shared by tests that only read it."""
    return _fit_once(estimator, frame, fits)


@pytest.fixture(scope="module")
def transformer(any_case, stage_storage, frame, made, fits):
    """The fitted model of an estimator, or a Transformer; shared by tests that only read it."""
    stage = made.setdefault(any_case.stage, any_case.make(stage_storage))
    return _fit_once(stage, frame, fits) if any_case.model else stage


def _fit_once(estimator: Any, frame: Any, fits: dict[type[Any], Any]) -> Any:
    kind = type(estimator)
    if kind not in fits:
        fits[kind] = estimator.fit(frame)
    return fits[kind]


@pytest.fixture(scope="module")
def scored(fitted, frame):
    """Predictions of `fitted` for every row, by id."""
    rows: list[Any] = fitted.transform(frame).orderBy("id").collect()
    return rows
