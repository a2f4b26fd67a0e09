"""Every public stage: `STAGES` train, and `EXTRA_STAGES` are those of extras."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.ml.evaluation import Evaluator, MulticlassClassificationEvaluator, RegressionEvaluator
from pyspark.ml.functions import array_to_vector
from pyspark.sql import functions as F
from small_networks import linear, mlp
from spark_stages import SPARK_STAGES_RUN, spark_saves, spark_stages

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
    """A stage, which is imported when its tests run.

    Attributes:
        stage_path: `module:name` of the class.
        model_path: Class of the fitted model; "" for a Transformer.
        text_param: Param that tests set to any text.
        make_params: Returns Params for this suite's table; takes the folder for shards.
        evaluator: Makes Spark's evaluator of the task.
    """

    stage_path: str
    model_path: str = ""
    text_param: str = "predictionCol"
    make_params: Callable[[str], dict[str, Any]]
    evaluator: Callable[[], Evaluator] = Accuracy

    @property
    def stage(self) -> type[Any]:
        return _load(self.stage_path)

    @property
    def model(self) -> type[Any] | None:
        return _load(self.model_path) if self.model_path else None

    def make(self, storage_uri: str, **params: Any) -> Any:
        return self.stage(**self.make_params(storage_uri) | params)

    def make_evaluator(self) -> Evaluator:
        """Returns Spark's evaluator for this task if Spark can run it here."""
        return self.evaluator() if SPARK_STAGES_RUN else Accuracy()


def _load(path: str) -> type[Any]:
    module, _, name = path.partition(":")
    kind: type[Any] = getattr(import_module(module), name)
    return kind


def _training(network: ModelSpec, storage_uri: str) -> dict[str, Any]:
    place = {"storageUri": storage_uri, "showProgress": False}
    return {"model": network, "epochs": 2, "batchSize": 32, "learningRate": 0.05} | place


def _search(storage_uri: str) -> dict[str, Any]:
    from ringspark.extras.search import Uniform

    inner = STAGES[0].make(storage_uri, validationFraction=0.25)
    return {"estimator": inner, "space": {"learningRate": Uniform(1e-3, 1e-1, log=True)}, "seed": 3}


WINDOWS = {"keyCols": [], "timeCol": "id", "valueCols": ["a", "b"], "steps": 3, "targetCol": "a"}
NAMES = {"outputCol": "window", "labelCol": "next_a"}
STAGES = [
    StageCase(
        stage_path="ringspark.estimators:TorchClassifier",
        model_path="ringspark.estimators:TorchClassificationModel",
        make_params=partial(_training, mlp(2)),
        evaluator=partial(MulticlassClassificationEvaluator, metricName="accuracy"),
    ),
    StageCase(
        stage_path="ringspark.estimators:TorchRegressor",
        model_path="ringspark.estimators:TorchRegressionModel",
        make_params=partial(_training, linear()),
        evaluator=RegressionEvaluator,
    ),
    StageCase(
        stage_path="ringspark.estimators:TorchEstimator",
        model_path="ringspark.estimators:TorchModel",
        make_params=partial(_training, linear()),
        evaluator=RegressionEvaluator,
    ),
]
EXTRA_STAGES = [
    StageCase(
        stage_path="ringspark.extras.windows.sequence_windows:SequenceWindows",
        text_param="outputCol",
        make_params=lambda _: WINDOWS | NAMES,
    ),
    StageCase(
        stage_path="ringspark.extras.search:OptunaSearch",
        model_path="ringspark.extras.search:SearchModel",
        text_param="monitor",
        make_params=lambda uri: _search(uri) | {"numTrials": 1},
    ),
    StageCase(
        stage_path="ringspark.extras.search:PopulationSearch",
        model_path="ringspark.extras.search:SearchModel",
        text_param="monitor",
        make_params=lambda uri: _search(uri) | {"population": 2, "epochsPerRound": 2},
    ),
    StageCase(
        stage_path="ringspark.extras.pretraining.autoencoder:TorchAutoencoder",
        model_path="ringspark.extras.pretraining.autoencoder:TorchAutoencoderModel",
        make_params=lambda uri: _training(linear(2), uri) | {"noise": 0.1},
    ),
]


def _param(case: StageCase, *marks: Any) -> Any:
    """One stage, and those without a fit, cover most failures; `make test-all` runs all stages."""
    slow = [pytest.mark.slow] if case.model_path and case is not STAGES[0] else []
    return pytest.param(case, id=case.stage_path.rpartition(":")[2], marks=[*marks, *slow])


CASES = [_param(case) for case in STAGES]
EXTRA_CASES = [_param(case, pytest.mark.extras) for case in EXTRA_STAGES]


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return request.param


@pytest.fixture(scope="module", params=[*CASES, *EXTRA_CASES])
def any_case(request):
    return request.param


@pytest.fixture
def listed():
    return [*STAGES, *EXTRA_STAGES]


@pytest.fixture(scope="module")
def stage_storage(tmp_path_factory):
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
def stages(stage_storage, frame):
    """Functions that return the one stage of a case, which no test may change, and its fitted model."""
    make = cache(lambda case: case.make(stage_storage))
    return SimpleNamespace(make=make, fit=cache(lambda case: make(case).fit(frame)))


@pytest.fixture(scope="module")
def estimator(case, stages):
    return stages.make(case)


@pytest.fixture(scope="module")
def fitted(case, stages):
    return stages.fit(case)


@pytest.fixture(scope="module")
def transformer(any_case, stages):
    """The fitted model of an estimator, or a Transformer."""
    return stages.fit(any_case) if any_case.model_path else stages.make(any_case)


@pytest.fixture(scope="module")
def scored(fitted, frame):
    return fitted.transform(frame).orderBy("id").collect()
