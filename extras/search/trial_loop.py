"""Runs the trials of a search: threads train concurrently, and one thread watches all trials.

If a driver was killed, its unfinished trials are resumed. Only the best trial keeps its folder.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from pyspark.sql import SparkSession

from ringspark.estimators.checked_fit import CheckedFit
from ringspark.estimators.failures import WorkerError
from ringspark.estimators.run.folder import RunFolder, RunRefusedError
from ringspark.estimators.stages.summary import TrainingSummary
from ringspark.estimators.training.history import EpochRecord, read_history
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.extras.runs.listing import remove_run_of
from ringspark.extras.runs.stored_runs import discard_run
from ringspark.extras.search.objective import Objective
from ringspark.extras.search.space import Space
from ringspark.extras.search.stop_file import ask_to_stop
from ringspark.extras.search.study import import_optuna
from ringspark.extras.search.trainings import SearchFolder, failure_reason, run_in_threads, train_in
from ringspark.extras.search.trial_data import TrialData
from ringspark.extras.search.trial_table import EPOCHS, REASON, SECONDS
from ringspark.models.process_state import ignore_warnings
from ringspark.pipelines import storage
from ringspark.pipelines.folder_removal import discard

TRIALS = "trials"
# Attribute of a trial: epoch -> whether the pruner ended it there.
_DECISIONS = "pruned"

_logger = logging.getLogger(__name__)


class RunningTrial:
    """What the driver knows of a running trial. Thread-safe.

    Whether the trial is pruned depends only on its values per epoch, not on the time when the driver reads
    them.
    """

    def __init__(self, trial: Any, run_uri: str, stop_uri: str, epochs: int, objective: Objective) -> None:
        self.trial = trial
        self.is_pruned = False
        self.num_epochs = 0
        self._run_uri, self._stop_uri = run_uri, stop_uri
        self._epochs, self._objective = epochs, objective
        self._lock = threading.Lock()
        known = trial.study._storage.get_trial(trial._trial_id)
        # Successive halving notes in the trial what it judged, and decides otherwise the second time.
        self._decisions: dict[str, bool] = dict(known.user_attrs.get(_DECISIONS, {}))
        # Values from an earlier driver, whose training resumes or starts again with the same values.
        self._last_reported = max(known.intermediate_values, default=0)

    def look(self) -> None:
        # The store may fail for a moment; the next call, or the end of the training, reads the same.
        with suppress(OSError, ValueError):
            self.report(read_history(self._run_uri))

    def report(self, history: Sequence[EpochRecord]) -> None:
        with self._lock:
            for record in history[self.num_epochs :]:
                if self.is_pruned:
                    return
                self.num_epochs = record.epoch
                if record.epoch > self._last_reported:
                    self.trial.report(self._objective.of_epoch(record), record.epoch)
                # The last epoch is already trained, and the earlier driver has judged the epochs before its
                # last report.
                if record.epoch < max(self._last_reported, 1) or record.epoch >= self._epochs:
                    continue
                if str(record.epoch) not in self._decisions:
                    # numpy warns about NaN, but a trial with NaN is pruned anyway.
                    with ignore_warnings(category=RuntimeWarning):
                        self._decisions[str(record.epoch)] = bool(self.trial.should_prune())
                    self.trial.set_user_attr(_DECISIONS, self._decisions)
                self.is_pruned = self._decisions[str(record.epoch)]
                if self.is_pruned:
                    self.stop()

    def stop(self) -> None:
        with suppress(OSError):
            ask_to_stop(self._stop_uri)


class TrialLoop:
    def __init__(
        self,
        *,
        spark: SparkSession,
        study: Any,
        make_sampler: Callable[[int], Any],
        space: Space,
        objective: Objective,
        data: TrialData,
        dataset: Any,
        run_uri: str | None,
    ) -> None:
        self._spark, self._study, self._make_sampler = spark, study, make_sampler
        self._space, self._objective = space, objective
        self._data, self._dataset = data, dataset
        self._run_uri, self._folder = run_uri, SearchFolder(run_uri)
        self._lock = threading.Lock()
        self._running: dict[int, RunningTrial] = {}
        self._is_over = False
        # A sampler without further values, such as optuna's GridSampler, calls this.
        self._has_all = threading.Event()
        study.stop = self._has_all.set
        self._errors: list[BaseException] = []
        self._best: tuple[int, Any] | None = None
        self._trained: list[TrainingSummary] = []
        # Started by an earlier driver, but not ended.
        self._unfinished = [t for t in study.get_trials(deepcopy=False) if not t.state.is_finished()]

    def run(self, num_trials: int, parallelism: int) -> None:
        self._folder.claim()
        try:
            run_in_threads(
                self._spark,
                lambda: self._work(num_trials),
                min(parallelism, num_trials),
                watch=self._watch,
                end=self._end,
            )
            if self._errors:
                raise self._errors[0]
        except BaseException:
            if self._run_uri is None:  # else a later fit resumes the trials
                for summary in self._trained:
                    remove_run_of(summary, discard)
            raise

    def best(self) -> tuple[Any, dict[str, Any]]:
        """Returns the best trial's model and values.

        If an earlier driver ran the trial, its folder has the model.
        """
        number = self._best_number()
        if number is None:
            ended = [t for t in self._study.get_trials(deepcopy=False) if t.user_attrs.get(REASON)]
            why = f"; the last one failed: {ended[-1].user_attrs[REASON]}" if ended else ""
            raise RuntimeError(f"none of the search's trials has finished{why}")
        trial = self._as_trial(self._study.get_trials(deepcopy=False)[number])
        values = self._space.values(trial)
        if self._best is None or self._best[0] != number:
            assert self._run_uri is not None
            self._best = (number, self._train(trial, values, None))
        if self._run_uri is not None:  # it may hold folders of a killed driver
            self._folder.check_owner()
            folder = storage.join(self._run_uri, TRIALS)
            for name in storage.list_names(folder):
                if name != str(number):
                    discard_run(storage.join(folder, name))
        return self._best[1], values

    def _watch(self) -> None:
        with self._lock:
            running = list(self._running.values())
        for each in running:
            each.look()

    def _end(self, error: BaseException) -> None:
        with self._lock:
            self._is_over = True
            self._errors.append(error)
            running = list(self._running.values())
        for each in running:
            each.stop()

    def _work(self, num_trials: int) -> None:
        try:
            while True:
                with self._lock:
                    found = None if self._is_over else self._next(num_trials)
                if found is None:
                    return
                self._run_trial(*found)
        except BaseException as error:
            self._end(error)

    def _next(self, num_trials: int) -> tuple[Any, dict[str, Any]] | None:
        """Returns the next trial and its values: an unfinished trial of an earlier driver, or a new one."""
        number = len(self._study.get_trials(deepcopy=False))
        if self._unfinished:
            frozen = self._unfinished.pop(0)
            self._study.sampler = self._make_sampler(frozen.number)
            trial = self._as_trial(frozen)
        elif number < num_trials and not self._has_all.is_set():
            self._folder.check_owner()
            self._study.sampler = self._make_sampler(number)
            trial = self._study.ask()
        else:
            return None
        # Drawn here, by the sampler of this trial.
        return trial, self._space.values(trial)

    def _as_trial(self, frozen: Any) -> Any:
        return import_optuna().trial.Trial(self._study, frozen._trial_id)

    def _run_trial(self, trial: Any, values: dict[str, Any]) -> None:
        started = time.monotonic()
        running: list[RunningTrial] = []
        model, value, reason = None, math.nan, ""
        try:
            model = self._train(trial, values, running)
            running[0].report(model.summary.epochs)
            if not running[0].is_pruned:
                value = self._objective.of_trial(model)
                reason = "" if math.isfinite(value) else f"the value of the trial is {value}"
        except RunRefusedError:
            raise  # not the trial's fault: every trial of an earlier driver would be refused
        except (WorkerError, ValueError) as error:
            if self._is_over:
                return  # unfinished: a later fit resumes it
            reason = failure_reason(error)
        finally:
            with self._lock:
                self._running.pop(trial.number, None)
        is_pruned = bool(running) and running[0].is_pruned
        trial.set_user_attr(SECONDS, time.monotonic() - started)
        trial.set_user_attr(EPOCHS, running[0].num_epochs if running else 0)
        with self._lock:
            self._tell(trial, value, "" if is_pruned else reason, is_pruned)
            if is_pruned or reason:
                if model is not None:
                    remove_run_of(model.summary, discard)
            else:
                self._keep_best(trial.number, model)

    def _train(self, trial: Any, values: dict[str, Any], running: list[RunningTrial] | None) -> Any:
        estimator = self._space.applied(values)
        if self._run_uri is None:
            run = RunFolder.new(estimator._storage_root(self._spark))
        else:
            run = RunFolder.given(storage.join(self._run_uri, TRIALS, str(trial.number)), resume=True)

        def begin(fit: CheckedFit, stop_uri: str) -> TrainConfig:
            if running is not None:
                watched = RunningTrial(trial, run.uri, stop_uri, fit.config.epochs, self._objective)
                running.append(watched)
                with self._lock:
                    if self._is_over:
                        watched.stop()
                    self._running[trial.number] = watched
            return fit.config

        model = train_in(run, estimator, self._dataset, self._data, begin)
        self._trained.append(model.summary)
        return model

    def _tell(self, trial: Any, value: float, reason: str, is_pruned: bool) -> None:
        self._folder.check_owner()
        states = import_optuna().trial.TrialState
        if is_pruned:
            self._study.tell(trial, state=states.PRUNED)
        elif reason:
            _logger.warning("trial %d of the search failed: %s", trial.number, reason)
            trial.set_user_attr(REASON, reason)
            self._study.tell(trial, state=states.FAIL)
        else:
            self._study.tell(trial, value)

    def _keep_best(self, number: int, model: Any) -> None:
        if self._best_number() != number:
            remove_run_of(model.summary, discard)
            return
        last, self._best = self._best, (number, model)
        if last is not None:
            remove_run_of(last[1].summary, discard)

    def _best_number(self) -> int | None:
        """Returns the number of the best trial so far; the lowest number if several are equally good."""
        states = import_optuna().trial.TrialState
        done = [t for t in self._study.get_trials(deepcopy=False) if t.state == states.COMPLETE]
        if not done:
            return None
        best = max if self._objective.is_larger_better else min
        value = best(t.value for t in done)
        return int(min(t.number for t in done if t.value == value))
