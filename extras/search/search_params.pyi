# Written by scripts/show_stubs.py from search_params.py.
# mypy: disable-error-code="assignment, override"
from typing import Any, TypeVar
from pyspark.ml.param import Param
from ringspark.estimators.stages.declared import DeclaredParams, Getter, Setter

S = TypeVar('S', bound='OptunaParams')

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
