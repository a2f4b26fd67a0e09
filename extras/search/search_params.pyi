# Written by scripts/show_stubs.py from search_params.py.
# mypy: disable-error-code="assignment, override"
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pyspark.ml.param import Param

from ringspark.estimators.stages.declared import Getter, Setter

from ringspark.estimators.options.finetuning import LoRA, Pretrained
from ringspark.estimators.options.mesh import Mesh
from ringspark.estimators.options.privacy import Privacy
from ringspark.estimators.options.scaling import ScaleLearningRate
from ringspark.estimators.options.sync import Sync
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar
from annotated_types import Ge, Gt, Le, Lt
from pyspark.ml import Estimator
from pyspark.ml.evaluation import Evaluator
from ringspark.estimators.options.checked import AtLeast1, Finite, WrongTypeError
from ringspark.estimators.stages.declared import DeclaredParams, with_settings
from ringspark.estimators.training.settings.data import without_secrets
from ringspark.estimators.training.settings.setting import Section, setting, settings_of
from ringspark.extras.search import ranges
from ringspark.extras.search.space import as_param

S = TypeVar('S', bound='OptunaParams')

@dataclass(frozen=True, kw_only=True)
class Search(Section):
    estimator: Any
    space: Any
    evaluator: Any
    monitor: str | None
    parallelism: AtLeast1
    train_ratio: Annotated[float, Gt(0), Lt(1)]
    seed: int
    run_uri: str | None

@dataclass(frozen=True, kw_only=True)
class Trials(Section):
    num_trials: AtLeast1
    sampler: Any
    pruner: Any

@dataclass(frozen=True, kw_only=True)
class Population(Section):
    population: Annotated[int, Ge(2)]
    epochs_per_round: AtLeast1
    quantile: Annotated[float, Gt(0), Le(0.5)]
    perturbation: Annotated[float, Gt(1), Finite]

class SearchParams(DeclaredParams):
    def getSpace(self) -> Any: ...
    estimator: Param[Any]; getEstimator: Getter[Any]; setEstimator: Setter[Any]
    space: Param[Any]; setSpace: Setter[Any]
    evaluator: Param[Any]; getEvaluator: Getter[Any]; setEvaluator: Setter[Any]
    monitor: Param[Any]; getMonitor: Getter[str | None]; setMonitor: Setter[str | None]
    parallelism: Param[Any]; getParallelism: Getter[int]; setParallelism: Setter[int | None]
    trainRatio: Param[Any]; getTrainRatio: Getter[float]; setTrainRatio: Setter[float | None]
    seed: Param[Any]; getSeed: Getter[int]; setSeed: Setter[int | None]
    runUri: Param[Any]; getRunUri: Getter[str | None]; setRunUri: Setter[str | None]

class OptunaParams(SearchParams):
    def _set(self: S, **values: Any) -> S: ...
    def __init__(self, *,
        seed: int | None = ..., monitor: str | None = ..., parallelism: int | None = ..., runUri: str | None = ...,
        estimator: Any = ..., space: Any = ..., evaluator: Any = ..., trainRatio: float | None = ...,
        numTrials: int | None = ..., sampler: Any = ..., pruner: Any = ...
    ) -> None: ...
    numTrials: Param[Any]; getNumTrials: Getter[int]; setNumTrials: Setter[int | None]
    sampler: Param[Any]; getSampler: Getter[Any]; setSampler: Setter[Any]
    pruner: Param[Any]; getPruner: Getter[Any]; setPruner: Setter[Any]

class PopulationParams(SearchParams):
    def __init__(self, *,
        seed: int | None = ..., monitor: str | None = ..., parallelism: int | None = ..., runUri: str | None = ...,
        estimator: Any = ..., space: Any = ..., evaluator: Any = ..., trainRatio: float | None = ...,
        population: int | None = ..., epochsPerRound: int | None = ..., quantile: float | None = ...,
        perturbation: float | None = ...
    ) -> None: ...
    population: Param[Any]; getPopulation: Getter[int]; setPopulation: Setter[int | None]
    epochsPerRound: Param[Any]; getEpochsPerRound: Getter[int]; setEpochsPerRound: Setter[int | None]
    quantile: Param[Any]; getQuantile: Getter[float]; setQuantile: Setter[float | None]
    perturbation: Param[Any]; getPerturbation: Getter[float]; setPerturbation: Setter[float | None]
