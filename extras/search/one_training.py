"""Runs one training of a search, which a file can stop, on rows that all trainings share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pyspark.sql import DataFrame

from ringspark.estimators import run_layout
from ringspark.estimators.checked_fit import CheckedFit
from ringspark.estimators.run.folder import RunFolder
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.extras.search.stop_file import StopFile, forget_stop
from ringspark.extras.search.trial_data import TrialData
from ringspark.pipelines import storage


def train_in(
    run: RunFolder,
    estimator: Any,
    dataset: DataFrame,
    data: TrialData,
    begin: Callable[[CheckedFit, str], TrainConfig],
) -> Any:
    """Trains in a folder, unless the training is finished; returns the model.

    `begin` gets the settings and the file that stops the gang; it returns the settings to train with.
    """
    stop_uri = storage.join(run.uri, run_layout.STOP)
    with run.guarded():
        callbacks = [*estimator.getOrDefault("callbacks"), StopFile(stop_uri)]
        estimator = estimator.copy({estimator.callbacks: callbacks})
        fit = CheckedFit.of(estimator, dataset)
        manifest = data.manifest(fit.data)
        forget_stop(stop_uri)
        fit = replace(fit, config=begin(fit, stop_uri))
        return estimator._train_on(dataset.sparkSession, run, fit, manifest)
