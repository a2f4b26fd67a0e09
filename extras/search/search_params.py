"""The Params of the searches."""

from __future__ import annotations

import math
from typing import Any, TypeVar

from pyspark.ml import Estimator
from pyspark.ml.evaluation import Evaluator

from ringspark.estimators.options.base import ValueRange, at_least
from ringspark.estimators.stages.declared import DeclaredParams, declared, param_of, setter
from ringspark.estimators.training.settings.data import without_secrets
from ringspark.estimators.training.settings.declaration import Setting
from ringspark.extras.search import ranges
from ringspark.extras.search.space import as_param

S = TypeVar("S", bound="_OptunaParams")


def _of_class(name: str, kind: type, rule: str) -> Any:
    def convert(value: Any) -> Any:
        if not isinstance(value, kind):
            raise TypeError(f"{name} {rule}, got {value!r:.80}")
        return value

    return convert


def _setting(name: str, words: str, **more: Any) -> Setting[Any]:
    return Setting(name=name, words=words, **more)


def _of_optuna(name: str, method: str) -> Any:
    def convert(value: Any) -> Any:
        # Without an import of optuna, which may not be installed where a saved search is loaded.
        if not isinstance(value, str) and not callable(getattr(value, method, None)):
            raise TypeError(f"{name} must be a name or an optuna {name}, got {value!r:.80}")
        return value

    return convert


_SPACE = _setting(
    "space",
    "dict from Params of the estimator, or 'model.x' for an argument of its ModelSpec, to Uniform, IntRange "
    "or Choice; or a callable from an optuna trial to a dict of values",
    convert=as_param,
)
_NUM_TRIALS = _setting(
    "numTrials", "number of trials, including pruned and failed trials", default=20, accepts=at_least(1)
)
_PARALLELISM = _setting(
    "parallelism", "number of concurrent trainings; each waits for slots", default=1, accepts=at_least(1)
)
_TRAIN_RATIO = _setting(
    "trainRatio",
    "share of the rows to train on; the evaluator gets the other rows. Without an evaluator, or if the "
    "estimator has a validationIndicatorCol, it has no effect",
    default=0.75,
    accepts=ValueRange(lambda value: 0 < value < 1, lambda: "must be between 0 and 1"),
)
_SAMPLER = _setting(
    "sampler",
    "'tpe', 'random', or a sampler of optuna",
    default="tpe",
    convert=_of_optuna("sampler", "sample_independent"),
)
_PRUNER = _setting(
    "pruner",
    "rule that may end a trial after an epoch: 'median', 'halving', 'hyperband', 'none' or None, or a "
    "pruner of optuna",
    default="median",
    convert=_of_optuna("pruner", "prune"),
)
_SEED = _setting("seed", "seed of all random choices of the search, and of the held-out rows", default=0)
_POPULATION = _setting(
    "population", "number of members; all train in each round", default=8, accepts=at_least(2, "members")
)
_EPOCHS_PER_ROUND = _setting(
    "epochsPerRound",
    "epochs that members train between two comparisons; the estimator's epochs cover all rounds",
    default=1,
    accepts=at_least(1),
)
_QUANTILE = _setting(
    "quantile",
    "share of members in the best and in the worst group; after a round, the worst resume from the best",
    default=0.25,
    accepts=ValueRange(lambda value: 0 < value <= 0.5, lambda: "must be above 0 and at most 0.5"),
)
_PERTURBATION = _setting(
    "perturbation",
    "factor that multiplies or divides each numeric setting of a member that copied another member",
    default=1.2,
    accepts=ValueRange(lambda value: 1 < value < math.inf, lambda: "must be above 1 and finite"),
)


def named_pruner(values: dict[str, Any]) -> dict[str, Any]:
    """Replaces the pruner None by "none", because Spark would treat None as the default."""
    return values | ({"pruner": "none"} if "pruner" in values and values["pruner"] is None else {})


class _SearchParams(DeclaredParams):
    estimator, getEstimator, setEstimator = declared(
        _setting(
            "estimator",
            "TorchClassifier, TorchRegressor or TorchEstimator to search; each training fits a copy of it",
            convert=_of_class("estimator", Estimator, "must be an estimator"),
        )
    )
    space, setSpace = param_of(_SPACE), setter(_SPACE)
    evaluator, getEvaluator, setEvaluator = declared(
        _setting(
            "evaluator",
            "evaluator whose metric on held-out rows ranks the trainings; unset: `monitor` ranks them",
            convert=_of_class("evaluator", Evaluator, "must be an Evaluator of Spark ML"),
        )
    )
    monitor, getMonitor, setMonitor = declared(
        _setting(
            "monitor",
            "entry of the history for pruners; without an evaluator it is also a training's value. Unset: "
            "the estimator's monitor, which is the loss of the held-out rows by default",
            kind="str",
        )
    )
    parallelism, getParallelism, setParallelism = declared(_PARALLELISM)
    trainRatio, getTrainRatio, setTrainRatio = declared(_TRAIN_RATIO)
    seed, getSeed, setSeed = declared(_SEED)
    runUri, getRunUri, setRunUri = declared(
        _setting(
            "runUri",
            "folder of this search; a fit with the same folder resumes it. Unset: a search cannot resume "
            "after its driver died",
            convert=without_secrets,
        )
    )

    _defaults: tuple[Setting[Any], ...] = (_PARALLELISM, _TRAIN_RATIO, _SEED)

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(**{setting.name: setting.default for setting in self._defaults})

    def getSpace(self) -> Any:
        """Gets `space`: a dict from names to ranges, or a callable."""
        held = self.getOrDefault("space") if self.isDefined("space") else None
        if held is None or callable(held):
            return held
        return {
            name: ranges.from_json(value) if isinstance(value, dict) else value
            for name, value in held.items()
        }


class _OptunaParams(_SearchParams):
    numTrials, getNumTrials, setNumTrials = declared(_NUM_TRIALS)
    sampler, getSampler, setSampler = declared(_SAMPLER)
    pruner, getPruner, setPruner = declared(_PRUNER)

    _defaults = (*_SearchParams._defaults, _NUM_TRIALS, _SAMPLER, _PRUNER)

    def _set(self: S, **values: Any) -> S:
        return super()._set(**named_pruner(values))


class _PopulationParams(_SearchParams):
    population, getPopulation, setPopulation = declared(_POPULATION)
    epochsPerRound, getEpochsPerRound, setEpochsPerRound = declared(_EPOCHS_PER_ROUND)
    quantile, getQuantile, setQuantile = declared(_QUANTILE)
    perturbation, getPerturbation, setPerturbation = declared(_PERTURBATION)
    _defaults = (*_SearchParams._defaults, _POPULATION, _EPOCHS_PER_ROUND, _QUANTILE, _PERTURBATION)
