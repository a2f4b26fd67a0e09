"""Trains copies of a search's estimator in several threads, each copy in its own folder."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from pyspark import InheritableThread

from ringspark.estimators import run_layout
from ringspark.estimators.checked_fit import CheckedFit
from ringspark.estimators.launch.owner import read_owner, write_owner
from ringspark.estimators.prepared_fit import PreparedFit
from ringspark.estimators.run.folder import RunFolder
from ringspark.extras.runs.listing import discard_run
from ringspark.extras.search.objective import Objective
from ringspark.extras.search.space import Space
from ringspark.extras.search.stop_file import StopFile
from ringspark.extras.search.trial_data import TrialData
from ringspark.pipelines import storage
from ringspark.pipelines.spark_paths import is_remote

# Prefixes of the names of trainings: folders in the folder of a search.
TRIALS = "trials"
ROUND = "round-"


class Trainings:
    """The trainings of one search. Each has a name, such as "trials/3".

    `run_uri` is the folder of the search, which only one driver at a time may write. If it is None, each
    training has a new folder in the estimator's storageUri.
    """

    def __init__(self, space: Space, objective: Objective, data: TrialData) -> None:
        self.space, self.objective, self.run_uri = space, objective, data.run_uri
        # Held while a thread asks for its next task; the loops hold it for their own state.
        self.lock = threading.Lock()
        self._data = data
        self._token = uuid.uuid4().hex
        self._errors: list[BaseException] = []
        self._running: set[str] = set()
        self._uris: dict[str, str] = {}

    @property
    def is_over(self) -> bool:
        """Whether an error or interrupt has ended the search."""
        return bool(self._errors)

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Claims the search's folder. After an error, a search without a folder removes its trainings."""
        if self.run_uri is not None:
            write_owner(self.run_uri, self._token, 0)
        try:
            yield
        except BaseException:
            if self.run_uri is None:  # else a later fit resumes the trainings
                self.keep_only("")
            raise

    def check_owner(self) -> None:
        """Raises RuntimeError if another driver has taken over the search."""
        if self.run_uri is None:
            return
        owner = read_owner(self.run_uri)
        if owner is None or owner.token != self._token:
            raise RuntimeError(
                f"another driver has taken over the search in {self.run_uri!r}; continue it there"
            )

    def run(self, tasks: Iterator[Callable[[], None]], num_threads: int) -> None:
        """Calls the tasks in several threads, and returns when all have ended.

        After an error or interrupt no task starts, the running trainings are stopped, and the first error is
        raised when all threads have ended.
        """

        def work() -> None:
            try:
                while True:
                    with self.lock:
                        task = None if self._errors else next(tasks, None)
                    if task is None:
                        return
                    task()
            except BaseException as error:
                self._end(error)

        kind = threading.Thread if is_remote(self._data.dataset.sparkSession) else InheritableThread
        threads = [kind(target=work, name=f"ringspark-search-{i}", daemon=True) for i in range(num_threads)]
        try:
            for thread in threads:
                thread.start()
            _join(threads)
        except BaseException as error:
            self._end(error)
            _join(threads)
            raise
        if self._errors:
            raise self._errors[0]

    def train(
        self,
        name: str,
        values: Mapping[str, Any],
        begin: Callable[[RunFolder, CheckedFit], CheckedFit] = lambda run, fit: fit,
    ) -> Any:
        """Trains with the values and returns the model; a finished training is not repeated.

        `begin` returns the fit, perhaps changed, before the workers start.
        """
        estimator, spark = self.space.applied(values), self._data.dataset.sparkSession
        if self.run_uri is None:
            run = RunFolder.new(estimator._storage_root(spark))
        else:
            run = RunFolder.given(storage.join(self.run_uri, name), resume=True)
        self._uris[name] = run.uri
        try:
            with run.guarded():
                stop_uri = storage.join(run.uri, run_layout.STOP)
                callbacks = [*estimator.getOrDefault("callbacks"), StopFile(stop_uri)]
                estimator = estimator.copy({estimator.callbacks: callbacks})
                fit = CheckedFit.of(estimator, self._data.dataset)
                manifest = self._data.manifest(fit.data)
                with suppress(FileNotFoundError):
                    storage.remove(stop_uri)  # an earlier driver's
                self._running.add(name)
                if self._errors:
                    self.stop(name)
                prepared = PreparedFit(estimator, self._data.dataset)
                return estimator._train_on(spark, run, begin(run, fit), manifest, prepared)
        finally:
            self._running.discard(name)

    def stop(self, name: str) -> None:
        with suppress(OSError):  # then the training ends by itself
            storage.write_atomic(storage.join(self._uris[name], run_layout.STOP), b"")

    def uri(self, name: str) -> str:
        return self._uris[name] if self.run_uri is None else storage.join(self.run_uri, name)

    def discard(self, name: str) -> None:
        """Removes the folder of a training of this driver."""
        uri = self._uris.pop(name, None)
        if uri is not None:
            discard_run(uri)

    def keep_only(self, kept: str) -> None:
        """Removes the folders of all other trainings, also those of a killed driver."""
        for name in [name for name in self._uris if name != kept]:
            self.discard(name)
        if self.run_uri is None:
            return
        self.check_owner()
        for parent in storage.list_names(self.run_uri):
            if parent.startswith((TRIALS, ROUND)):
                folder = storage.join(self.run_uri, parent)
                for name in storage.list_names(folder):
                    if f"{parent}/{name}" != kept:
                        discard_run(storage.join(folder, name))
                storage.remove_if_empty(folder)

    def _end(self, error: BaseException) -> None:
        self._errors.append(error)
        for name in [*self._running]:
            self.stop(name)


def _join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        while thread.is_alive():
            thread.join(1.0)


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
