"""Code that both search loops use: one training, threads that run trainings, and the folder of a search."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pyspark import InheritableThread
from pyspark.sql import DataFrame, SparkSession

from ringspark.estimators import run_layout
from ringspark.estimators.checked_fit import CheckedFit
from ringspark.estimators.launch.owner import read_owner, write_owner
from ringspark.estimators.run.folder import RunFolder
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.extras.search.stop_file import StopFile, forget_stop
from ringspark.extras.search.trial_data import TrialData
from ringspark.pipelines import storage
from ringspark.pipelines.spark_paths import is_remote

POLL_SECONDS = 0.1


def train_in(
    run: RunFolder,
    estimator: Any,
    dataset: DataFrame,
    data: TrialData,
    begin: Callable[[CheckedFit, str], TrainConfig],
) -> Any:
    """Trains in a folder and returns the model; if the training there is finished, only returns its model.

    `begin` takes the settings and the path of the file that stops the training. It returns the settings to
    train with.
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


def run_in_threads(
    spark: SparkSession,
    work: Callable[[], None],
    number: int,
    *,
    watch: Callable[[], None],
    end: Callable[[BaseException], None],
) -> None:
    """Runs `work` in several threads, and returns when all have ended, even after an error or interrupt.

    `work` must not raise errors. The calling thread calls `watch` every `POLL_SECONDS`. If `watch` raises an
    error, the calling thread passes it to `end`, which must make `work` return soon.
    """
    kind = threading.Thread if is_remote(spark) else InheritableThread
    threads = [kind(target=work, name=f"ringspark-search-{i}", daemon=True) for i in range(number)]
    started = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        while any(thread.is_alive() for thread in threads):
            watch()
            time.sleep(POLL_SECONDS)
    except BaseException as error:
        end(error)
        raise
    finally:
        for thread in started:
            while thread.is_alive():
                thread.join(1.0)


class SearchFolder:
    """Folder of a search, which only one driver at a time may write; `uri` is None if there is no folder."""

    def __init__(self, uri: str | None) -> None:
        self.uri = uri
        self._token = uuid.uuid4().hex

    def claim(self) -> None:
        if self.uri is not None:
            write_owner(self.uri, self._token, 0)

    def check_owner(self) -> None:
        """Raises RuntimeError if another driver has taken over the search."""
        if self.uri is None:
            return
        owner = read_owner(self.uri)
        if owner is None or owner.token != self._token:
            raise RuntimeError(f"another driver has taken over the search in {self.uri!r}; continue it there")


def check_settings(run_uri: str | None, old: Mapping[str, str], new: Mapping[str, str]) -> None:
    names = sorted(old.keys() | new.keys())  # a setting may be in one of them alone
    changed = [f"{n}: {old.get(n)} -> {new.get(n)}" for n in names if old.get(n) != new.get(n)]
    if changed:
        raise ValueError(
            f"cannot resume the search in {run_uri!r}, because its settings differ: {'; '.join(changed)}; "
            "restore them, or set another runUri"
        )


def damage_error(run_uri: str | None, file: str, problem: object) -> ValueError:
    return ValueError(
        f"cannot resume the search in {run_uri!r}, because {file} is damaged ({problem}); set another runUri"
    )


def failure_reason(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
