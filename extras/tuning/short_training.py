"""Makes short trial trainings of an estimator, without the settings that only a full training needs."""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from ringspark.estimators.checked_fit import prepare_checked
from ringspark.estimators.techniques import techniques_in
from ringspark.estimators.torch_estimator import _TorchEstimator
from ringspark.estimators.training.settings.table import SETTINGS
from ringspark.pipelines.columns import check_frame, quote

_CLEARED = (
    *(name for name in SETTINGS if name.startswith("checkpointEvery")),
    *("runUri", "resume", "keepCheckpoints", "validationFraction", "monitor", "patience", "minDelta", "keep"),
    *("warmupSteps", "batchSizeSchedule", "scaleLearningRate", "validationIndicatorCol", "metrics"),
    *("tracking", "timelineEverySteps", "profileSteps"),
)


def check_estimator(estimator: Any, function: str) -> None:
    if not isinstance(estimator, _TorchEstimator):
        raise ValueError(
            f"{function} needs an estimator of ringspark, such as a TorchClassifier, got "
            f"{type(estimator).__name__}"
        )
    for technique in techniques_in(estimator):
        technique.check_many(estimator, function)


def plain_copy(estimator: Any) -> Any:
    """Returns a copy without run folder, checkpoints, validation, warm-up, trackers and progress output."""
    made = estimator.copy()
    for name in _CLEARED:
        if made.hasParam(name):
            made.clear(made.getParam(name))
    made.setShowProgress(False)
    return made


def prepare_training(estimator: Any, df: DataFrame, function: str) -> tuple[Any, DataFrame, int]:
    """Prepares and checks a training; returns its estimator, its training rows, and their number."""
    check_frame(df, function)
    prepared, fit = prepare_checked(estimator, df)
    rows, indicator = prepared.dataset, fit.data.validation_col
    if indicator is not None:
        rows = rows.where(~F.col(quote(indicator)).cast("boolean"))
    count = rows.count()
    if not count:
        raise ValueError(f"{function} needs training rows, got none")
    return prepared.estimator, rows, count
