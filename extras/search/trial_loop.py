"""Runs the trials of a search.

If a driver was killed, its unfinished trials are resumed. Only the best trial keeps its folder.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from ringspark.estimators.checked_fit import CheckedFit
from ringspark.estimators.failures import WorkerError
from ringspark.estimators.names import first_line
from ringspark.estimators.run.folder import RunFolder, RunRefusedError
from ringspark.estimators.tracking.base import Listener, RunStart, Tracker
from ringspark.estimators.training.history import EpochRecord
from ringspark.extras.search.objective import Objective
from ringspark.extras.search.study import import_optuna
from ringspark.extras.search.trainings import TRIALS, Trainings
from ringspark.extras.search.trial_table import EPOCHS, REASON, SECONDS, rows_of
from ringspark.models.process_state import ignore_warnings

# Attribute of a trial: epoch -> whether the pruner ended it there.
_DECISIONS = "pruned"

_logger = logging.getLogger(__name__)


class RunningTrial(Tracker, Listener):
    """Reports a trial's epochs to optuna, and stops the training if the pruner says so.

    Whether the trial is pruned depends only on its values per epoch, not on the time when the driver reads
    them. Pruners are not thread-safe, so trials share `lock`.
    """

    def __init__(
        self, trial: Any, objective: Objective, lock: threading.Lock, stop: Callable[[], None]
    ) -> None:
        self.is_pruned = False
        self.num_epochs = 0
        self._trial, self._objective, self._lock, self._stop = trial, objective, lock, stop
        self._epochs = math.inf  # until `begin`
        known = trial.study._storage.get_trial(trial._trial_id)
        # Successive halving notes in the trial what it judged, and decides otherwise the second time.
        self._decisions: dict[str, bool] = dict(known.user_attrs.get(_DECISIONS, {}))
        # Values from an earlier driver, whose training resumes or starts again with the same values.
        self._last_reported = max(known.intermediate_values, default=0)

    def begin(self, run: RunFolder, fit: CheckedFit) -> CheckedFit:
        self._epochs = fit.config.epochs
        return replace(fit, trackers=[*fit.trackers, self])

    def start(self, run: RunStart) -> Listener:
        return self

    def epoch(self, record: EpochRecord) -> None:
        with self._lock:
            # After a failed call, the end of the training reports the missing epochs.
            if self.is_pruned or record.epoch != self.num_epochs + 1:
                return
            if record.epoch > self._last_reported:
                self._trial.report(self._objective.of_epoch(record), record.epoch)
            # The last epoch is already trained, and the earlier driver has judged the epochs before its last
            # report.
            if max(self._last_reported, 1) <= record.epoch < self._epochs:
                self.is_pruned = self._judge(str(record.epoch))
            self.num_epochs = record.epoch
            if self.is_pruned:
                self._stop()

    def _judge(self, epoch: str) -> bool:
        if epoch not in self._decisions:
            # numpy warns about NaN, but a trial with NaN is pruned anyway.
            with ignore_warnings(category=RuntimeWarning):
                self._decisions[epoch] = bool(self._trial.should_prune())
            self._trial.set_user_attr(_DECISIONS, self._decisions)
        return self._decisions[epoch]


class TrialLoop:
    def __init__(
        self, trainings: Trainings, study: Any, make_sampler: Callable[[int], Any], num_trials: int
    ) -> None:
        self._trainings, self._study, self._make_sampler = trainings, study, make_sampler
        self._num_trials = num_trials
        # A sampler without further values, such as optuna's GridSampler, calls `study.stop`.
        self._has_all = threading.Event()
        study.stop = self._has_all.set
        # Number and model of the best trial of this driver.
        self._best: tuple[int, Any] = (-1, None)

    def run(self, parallelism: int) -> tuple[Any, dict[str, Any], list[dict[str, Any]]]:
        """Runs the missing trials; returns the best model, its settings, and the rows of `trials`."""
        self._trainings.run(self._tasks(), min(parallelism, self._num_trials))
        best = self._find_best()
        if best is None:
            ended = [t for t in self._study.get_trials(deepcopy=False) if t.user_attrs.get(REASON)]
            why = f"; the last one failed: {ended[-1].user_attrs[REASON]}" if ended else ""
            raise RuntimeError(f"none of the search's trials has finished{why}")
        name, values = _name(best.number), self._trainings.space.values(self._as_trial(best))
        number, model = self._best
        if number != best.number:  # the model of an earlier driver's training, from its folder
            model = self._trainings.train(name, values)
        self._trainings.keep_only(name)
        return model, values, rows_of(self._study, self._trainings.objective)

    def _tasks(self) -> Iterator[Callable[[], None]]:
        """Yields the unfinished trials of an earlier driver, then new trials."""
        for frozen in self._study.get_trials(deepcopy=False):
            if not frozen.state.is_finished():
                self._study.sampler = self._make_sampler(frozen.number)
                yield self._task(self._as_trial(frozen))
        while (number := len(self._study.get_trials(deepcopy=False))) < self._num_trials:
            if self._has_all.is_set():
                return
            self._trainings.check_owner()
            self._study.sampler = self._make_sampler(number)
            yield self._task(self._study.ask())

    def _task(self, trial: Any) -> Callable[[], None]:
        # The values are drawn here, by the sampler of this trial.
        return partial(self._run, trial, self._trainings.space.values(trial))

    def _as_trial(self, frozen: Any) -> Any:
        return import_optuna().trial.Trial(self._study, frozen._trial_id)

    def _run(self, trial: Any, values: dict[str, Any]) -> None:
        started, trainings, name = time.monotonic(), self._trainings, _name(trial.number)
        running = RunningTrial(trial, trainings.objective, trainings.lock, partial(trainings.stop, name))
        model, value, reason = None, math.nan, ""
        try:
            model = trainings.train(name, values, running.begin)
            for record in model.summary.epochs:
                running.epoch(record)
            if not running.is_pruned:
                value = trainings.objective.of_trial(model)
                reason = "" if math.isfinite(value) else f"the value of the trial is {value}"
        except RunRefusedError:
            raise  # not the trial's fault: every trial of an earlier driver would be refused
        except (WorkerError, ValueError) as error:
            if trainings.is_over:
                return  # unfinished: a later fit resumes it
            reason = first_line(error)
        trial.set_user_attr(SECONDS, time.monotonic() - started)
        trial.set_user_attr(EPOCHS, running.num_epochs)
        with trainings.lock:
            last = self._find_best()
            self._tell(trial, value, reason, running.is_pruned)
            best = self._find_best()
            if best is not None and best.number == trial.number:
                self._best = (best.number, model)
                if last is not None:
                    trainings.discard(_name(last.number))
            else:
                trainings.discard(name)

    def _tell(self, trial: Any, value: float, reason: str, is_pruned: bool) -> None:
        self._trainings.check_owner()
        states = import_optuna().trial.TrialState
        if is_pruned:
            self._study.tell(trial, state=states.PRUNED)
        elif reason:
            _logger.warning("trial %d of the search failed: %s", trial.number, reason)
            trial.set_user_attr(REASON, reason)
            self._study.tell(trial, state=states.FAIL)
        else:
            self._study.tell(trial, value)

    def _find_best(self) -> Any:
        """Returns the best trial so far, the first of equally good ones; None before one has finished."""
        done = self._study.get_trials(deepcopy=False, states=(import_optuna().trial.TrialState.COMPLETE,))
        best = max if self._trainings.objective.is_larger_better else min
        return best(done, key=lambda trial: trial.value, default=None)


def _name(number: int) -> str:
    return f"{TRIALS}/{number}"
