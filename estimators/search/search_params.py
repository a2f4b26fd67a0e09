"""The Params of a search."""

from __future__ import annotations

from typing import Any, TypeVar

from pyspark.ml import Estimator
from pyspark.ml.evaluation import Evaluator

from ringspark.estimators.search import ranges
from ringspark.estimators.search.space import as_param
from ringspark.estimators.stages.declared import DeclaredParams, declared, param_of, setter
from ringspark.estimators.training.settings.declaration import Range, Setting, at_least
from ringspark.estimators.training.settings.places import without_secrets

S = TypeVar("S", bound="_SearchParams")


def _of_class(name: str, kind: type, rule: str) -> Any:
    def convert(value: Any) -> Any:
        if not isinstance(value, kind):
            raise TypeError(f"{name} {rule}, got {value!r:.80}")
        return value

    return convert


def _setting(name: str, words: str, **more: Any) -> Setting[Any]:
    return Setting(name=name, words=words, **more)


def _any(value: Any) -> Any:
    return value


_SPACE = _setting(
    "space",
    "dict from Params of the estimator, or 'model.x' for an argument of its ModelSpec, to Uniform, IntRange "
    "or Choice; or a callable from an optuna trial to a dict of values",
    convert=as_param,
)
_NUM_TRIALS = _setting(
    "numTrials",
    "trials of the search, those that are pruned or fail included",
    default=20,
    accepts=at_least(1),
)
_PARALLELISM = _setting(
    "parallelism",
    "trials that train beside each other, as far as slots are free",
    default=1,
    accepts=at_least(1),
)
_TRAIN_RATIO = _setting(
    "trainRatio",
    "share of the rows to train on where an evaluator judges and the estimator has no validationIndicatorCol",
    default=0.75,
    accepts=Range(lambda value: 0 < value < 1, lambda: "must be between 0 and 1"),
)
_SAMPLER = _setting("sampler", "'tpe', 'random', or a sampler of optuna", default="tpe", convert=_any)
_PRUNER = _setting(
    "pruner",
    "what ends a trial after an epoch: 'median', 'halving', 'hyperband', 'none' or None, or a pruner of "
    "optuna",
    default="median",
    convert=_any,
)
_SEED = _setting("seed", "seed of the trials that are drawn, and of the rows held out", default=0)


def named_pruner(values: dict[str, Any]) -> dict[str, Any]:
    """Returns Params by name with "none" for a pruner that is None, which else would be the default."""
    return values | ({"pruner": "none"} if "pruner" in values and values["pruner"] is None else {})


class _SearchParams(DeclaredParams):
    """The Params of a search."""

    estimator, getEstimator, setEstimator = declared(
        _setting(
            "estimator",
            "estimator that each trial fits a copy of: a TorchClassifier, TorchRegressor or TorchEstimator",
            convert=_of_class("estimator", Estimator, "must be an estimator"),
        )
    )
    space, setSpace = param_of(_SPACE), setter(_SPACE)
    evaluator, getEvaluator, setEvaluator = declared(
        _setting(
            "evaluator",
            "evaluator whose metric on held-out rows is a trial's value; unset: `monitor`",
            convert=_of_class("evaluator", Evaluator, "must be an Evaluator of Spark ML"),
        )
    )
    monitor, getMonitor, setMonitor = declared(
        _setting(
            "monitor",
            "entry of the history that pruners see and, without an evaluator, a trial's value; unset: the "
            "estimator's own, which is the loss of the held-out rows by default",
            kind="str",
        )
    )
    numTrials, getNumTrials, setNumTrials = declared(_NUM_TRIALS)
    parallelism, getParallelism, setParallelism = declared(_PARALLELISM)
    trainRatio, getTrainRatio, setTrainRatio = declared(_TRAIN_RATIO)
    sampler, getSampler, setSampler = declared(_SAMPLER)
    pruner, getPruner, setPruner = declared(_PRUNER)
    seed, getSeed, setSeed = declared(_SEED)
    runUri, getRunUri, setRunUri = declared(
        _setting(
            "runUri",
            "folder of this one search on a disk; a fit with the same folder goes on with it. Unset: a "
            "search whose driver died is lost",
            convert=without_secrets,
        )
    )

    def __init__(self) -> None:
        super().__init__()
        defaults = (_NUM_TRIALS, _PARALLELISM, _TRAIN_RATIO, _SAMPLER, _PRUNER, _SEED)
        self._setDefault(**{setting.name: setting.default for setting in defaults})

    def _set(self: S, **values: Any) -> S:
        """Sets Params by name. None clears one, but as a pruner it means what it says: no pruning."""
        return super()._set(**named_pruner(values))

    def getSpace(self) -> Any:
        """Gets `space`: ranges by name, or the callable."""
        held = self.getOrDefault("space") if self.isDefined("space") else None
        if held is None or callable(held):
            return held
        return {
            name: ranges.from_json(value) if isinstance(value, dict) else value
            for name, value in held.items()
        }
