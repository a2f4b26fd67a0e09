"""`cross_validate`: evaluates an estimator on several folds, as a table."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
from pyspark.sql import DataFrame

from ringspark.estimators.stages.summary import TrainingSummary
from ringspark.estimators.techniques import techniques_in
from ringspark.estimators.torch_model import TorchModel
from ringspark.extras.runs.listing import remove_run_of
from ringspark.pipelines.columns import check_frame
from ringspark.pipelines.folder_removal import discard

_FOLD, _SECONDS = "fold", "seconds"


def cross_validate(
    estimator: Any, folds: Iterable[tuple[DataFrame, DataFrame]], evaluator: Any
) -> pd.DataFrame:
    """Fits an estimator on each fold, one after the other, and evaluates its model on the validation rows.

    Models and their run folders are not kept. Spark's own searches leave the folders of rejected models in
    the estimator's storageUri. To search over settings with folds, pass the column of `stratified_folds` or
    `grouped_folds` as `foldCol` to Spark's `CrossValidator`.

    Args:
        estimator: Any Spark ML estimator, including a `Pipeline` or a search.
        folds: (training rows, validation rows) of each fold, as from `fold_pairs` and `time_folds`.
        evaluator: A Spark ML evaluator, or a mapping of names to evaluators.

    Returns:
        One row per fold, with the columns "fold", the metrics by name, and "seconds".

    Raises:
        ValueError: An argument is invalid.
    """
    evaluators = _name_evaluators(evaluator)
    for stage in _stages(estimator):
        if hasattr(stage, "hasParam"):
            for technique in techniques_in(stage):
                technique.check_many(stage, "cross_validate")
        if getattr(stage, "hasParam", lambda _: False)("runUri") and stage.isSet("runUri"):
            raise ValueError(
                "runUri is the folder of one training, and cross_validate fits once per fold; leave it unset"
            )
    pairs = list(folds)
    if not pairs:
        raise ValueError("folds must hold at least one pair (training rows, validation rows), got none")
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(
                f"folds must hold pairs (training rows, validation rows), got {type(pair).__name__}; "
                "see fold_pairs and time_folds"
            )
        for rows in pair:
            check_frame(rows, "cross_validate")
    return pd.DataFrame([_row(number, estimator, *pair, evaluators) for number, pair in enumerate(pairs)])


def _row(
    number: int, estimator: Any, train: DataFrame, validation: DataFrame, evaluators: Mapping[str, Any]
) -> dict[str, float]:
    begun = time.monotonic()
    # A Pipeline may hold models that were fitted before; their folders stay.
    known = {summary.run_uri for summary in _summaries_of(estimator)}
    model = estimator.fit(train)
    try:
        predicted = model.transform(validation)
        if len(evaluators) > 1:
            predicted = predicted.cache()
        metrics = {name: float(each.evaluate(predicted)) for name, each in evaluators.items()}
        if len(evaluators) > 1:
            predicted.unpersist()
    finally:
        for summary in _summaries_of(model):
            if summary.run_uri not in known:
                remove_run_of(summary, discard)
    return {_FOLD: number, **metrics, _SECONDS: time.monotonic() - begun}


def _summaries_of(whole: Any) -> list[TrainingSummary]:
    models = [stage for stage in _stages(whole) if isinstance(stage, TorchModel)]
    return [model.summary for model in models if model.hasSummary]


def _stages(whole: Any) -> list[Any]:
    for name in ("getStages", "stages", "bestModel"):
        found = getattr(whole, name, None)
        if found is not None:
            parts = found() if callable(found) else found
            listed = parts if isinstance(parts, list) else [parts]
            return [stage for part in listed for stage in _stages(part)]
    return [whole]


def _name_evaluators(evaluator: Any) -> dict[str, Any]:
    if isinstance(evaluator, Mapping):
        named = dict(evaluator)
    elif hasattr(evaluator, "getMetricName"):
        named = {evaluator.getMetricName(): evaluator}
    else:
        named = {"metric": evaluator}
    for name, each in named.items():
        if not hasattr(each, "evaluate"):
            raise ValueError(
                f"evaluator must be an evaluator of Spark ML or a mapping of names to evaluators, got "
                f"{type(each).__name__} for {name!r}"
            )
        if name in (_FOLD, _SECONDS):
            raise ValueError(f"evaluator must not be named {name!r}, a column of the table; rename it")
    if not named:
        raise ValueError("evaluator must name at least one evaluator, got an empty mapping")
    return named
