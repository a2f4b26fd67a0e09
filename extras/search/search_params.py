"""The Params of the searches."""

from __future__ import annotations

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

S = TypeVar("S", bound="OptunaParams")


def _of_class(name: str, kind: type, rule: str) -> Any:
    def convert(value: Any) -> Any:
        if not isinstance(value, kind):
            raise WrongTypeError(f"{name} {rule}, got {value!r:.80}")
        return value

    return convert


@dataclass(frozen=True, kw_only=True)
class Search(Section):
    GROUP = "search"
    ON_DRIVER = True

    estimator: Any = setting(
        None,
        "TorchClassifier, TorchRegressor or TorchEstimator to search; each training fits a copy of it",
        convert=_of_class(
            "estimator", Estimator, "must be an estimator of ringspark such as TorchClassifier(...)"
        ),
    )
    space: Any = setting(
        None,
        "dict from Params of the estimator, or 'model.x' for an argument of its ModelSpec, to Uniform, "
        "IntRange or Choice; or a callable from an optuna trial to a dict of values",
        convert=as_param,
    )
    evaluator: Any = setting(
        None,
        "evaluator whose metric on held-out rows ranks the trainings; unset: `monitor` ranks them",
        convert=_of_class("evaluator", Evaluator, "must be an Evaluator of Spark ML"),
    )
    monitor: str | None = setting(
        None,
        "entry of the history for pruners; without an evaluator it is also a training's value. Unset: the "
        "estimator's monitor, which is the loss of the held-out rows by default",
    )
    parallelism: AtLeast1 = setting(
        1, "number of concurrent trainings; each waits until its Spark slots are free"
    )
    train_ratio: Annotated[float, Gt(0), Lt(1)] = setting(
        0.75,
        "share of the rows to train on; the evaluator gets the other rows. Without an evaluator, or if the "
        "estimator has a validationIndicatorCol, it has no effect",
    )
    seed: int = setting(0, "seed of all random choices of the search, and of the held-out rows")
    run_uri: str | None = setting(
        None,
        "folder of this search; a fit with the same folder resumes it. Unset: a search cannot resume after "
        "its driver dies",
        convert=without_secrets,
    )


@dataclass(frozen=True, kw_only=True)
class Trials(Section):
    GROUP = "search"
    ON_DRIVER = True

    num_trials: AtLeast1 = setting(20, "number of trials, including pruned and failed trials")
    # Only `fit` checks both, because a machine that loads a saved search may lack optuna.
    sampler: Any = setting("tpe", "'tpe', 'random', or a sampler of optuna")
    pruner: Any = setting(
        "median",
        "rule that may end a trial after an epoch: 'median', 'halving', 'hyperband', 'none' or None, or a "
        "pruner of optuna",
    )


@dataclass(frozen=True, kw_only=True)
class Population(Section):
    GROUP = "search"
    ON_DRIVER = True

    population: Annotated[int, Ge(2)] = setting(8, "number of members; all train in each round")
    epochs_per_round: AtLeast1 = setting(
        1, "epochs that members train between two comparisons; the estimator's epochs cover all rounds"
    )
    quantile: Annotated[float, Gt(0), Le(0.5)] = setting(
        0.25,
        "share of members in the best and in the worst group; after a round, the worst resume from the best",
    )
    perturbation: Annotated[float, Gt(1), Finite] = setting(
        1.2, "factor that multiplies or divides each numeric setting of a member that copied another member"
    )


@with_settings(*settings_of(Search).values())
class SearchParams(DeclaredParams):
    """The Params of all searches."""

    def getSpace(self) -> Any:
        """Gets `space`: a dict from names to ranges, or a callable."""
        held = self.getOrDefault("space") if self.isDefined("space") else None
        if held is None or callable(held):
            return held
        return {
            name: ranges.from_json(value) if isinstance(value, dict) else value
            for name, value in held.items()
        }


@with_settings(*settings_of(Trials).values())
class OptunaParams(SearchParams):
    """The Params of `OptunaSearch`."""

    def _set(self: S, **values: Any) -> S:
        # pruner=None means no pruner; for other Params None clears the value.
        return super()._set(**values | ({"pruner": "none"} if values.get("pruner", "") is None else {}))


@with_settings(*settings_of(Population).values())
class PopulationParams(SearchParams):
    """The Params of `PopulationSearch`."""
