"""Makes short trial trainings of an estimator, without the settings that only a full training needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from ringspark.estimators.checked_fit import prepare_checked
from ringspark.estimators.lazy_imports import load_object
from ringspark.estimators.table_fit import PreparedFit
from ringspark.estimators.torch_estimator import REFUSE_MANY, _TorchEstimator
from ringspark.estimators.training.settings import data, network, observation, recovery, training
from ringspark.estimators.training.settings.declaration import Setting
from ringspark.pipelines.columns import quote

_CLEARED: tuple[Setting[Any], ...] = (
    recovery.RUN_URI,
    recovery.RESUME,
    recovery.CHECKPOINT_EVERY_STEPS,
    recovery.CHECKPOINT_EVERY_EPOCHS,
    recovery.CHECKPOINT_EVERY_SECONDS,
    recovery.KEEP_CHECKPOINTS,
    data.VALIDATION_FRACTION,
    training.MONITOR,
    training.PATIENCE,
    training.MIN_DELTA,
    training.KEEP,
    training.WARMUP_STEPS,
    training.BATCH_SIZE_SCHEDULE,
    training.SCALE_LEARNING_RATE,
    data.VALIDATION_INDICATOR_COL,
    network.METRICS,
    observation.TRACKING,
    observation.TIMELINE_EVERY_STEPS,
    observation.PROFILE_STEPS,
)


def check_estimator(estimator: Any, function: str) -> None:
    if not isinstance(estimator, _TorchEstimator):
        raise ValueError(
            f"{function} needs an estimator of ringspark, such as a TorchClassifier, got "
            f"{type(estimator).__name__}"
        )
    load_object(REFUSE_MANY)(estimator, function)


def plain_copy(estimator: Any) -> Any:
    """Returns a copy without run folder, checkpoints, validation, warm-up, trackers and progress output."""
    made = estimator.copy()
    for setting in _CLEARED:
        if made.hasParam(setting.name):
            made.clear(made.getParam(setting.name))
    made.set(made.getParam(observation.SHOW_PROGRESS.name), False)
    return made


def prepare_training(estimator: Any, df: DataFrame) -> PreparedFit:
    """Prepares and checks a training. The result's `dataset` has only the training rows."""
    prepared, fit = prepare_checked(estimator, df)
    indicator = fit.data.validation_col
    if indicator is None:
        return prepared
    return replace(prepared, dataset=prepared.dataset.where(~F.col(quote(indicator)).cast("boolean")))
