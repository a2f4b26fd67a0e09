"""A running trial: its epochs are reported to optuna, whose pruner may end it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ringspark.estimators.training.history import EpochRecord, read_history
from ringspark.extras.search.objective import Objective
from ringspark.extras.search.stop_file import ask_to_stop
from ringspark.models.process_state import ignore_warnings


class RunningTrial:
    """The driver's view of one training. Thread-safe.

    Attributes:
        is_pruned: Whether the pruner has ended it. The decision depends only on the values of the epochs, in
            their order, not on the training's progress when the driver read them.
        num_epochs: Number of epochs up to the decision.
    """

    def __init__(self, trial: Any, run_uri: str, stop_uri: str, epochs: int, objective: Objective) -> None:
        self.trial = trial
        self.is_pruned = False
        self.num_epochs = 0
        self._run_uri, self._stop_uri = run_uri, stop_uri
        self._epochs, self._objective = epochs, objective
        self._lock = threading.Lock()
        reported = trial.study._storage.get_trial(trial._trial_id).intermediate_values
        # Values from an earlier driver, whose training resumes or starts again with the same values.
        self._last_reported = max(reported, default=0)

    def look(self) -> None:
        # The store may fail for a moment; the next call, or the end of the training, reads the same.
        with suppress(OSError, ValueError):
            self.report(read_history(self._run_uri))

    def report(self, history: Sequence[EpochRecord]) -> None:
        """Reports new epochs, and asks the gang to stop if the pruner ends the trial."""
        with self._lock:
            for record in history[self.num_epochs :]:
                if self.is_pruned:
                    return
                self._report(record)

    def stop(self) -> None:
        with suppress(OSError):
            ask_to_stop(self._stop_uri)

    def _report(self, record: EpochRecord) -> None:
        self.num_epochs = record.epoch
        if record.epoch > self._last_reported:
            self.trial.report(self._objective.of_epoch(record), record.epoch)
        # The last epoch is already trained, and the earlier driver has judged the epochs before its last
        # report.
        if record.epoch < max(self._last_reported, 1) or record.epoch >= self._epochs:
            return
        # numpy warns about NaN, but a trial with NaN is pruned anyway.
        with ignore_warnings(category=RuntimeWarning):
            self.is_pruned = bool(self.trial.should_prune())
        if self.is_pruned:
            self.stop()
