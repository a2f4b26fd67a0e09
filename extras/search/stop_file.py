"""Stops a training by a file that the driver writes into its run folder.

The training then ends with an error, like an error of user code; no process is killed.
"""

from __future__ import annotations

import time
from contextlib import suppress

from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.pipelines import storage

# Seconds between two checks, because a store may be slow.
LOOK_SECONDS = 0.25


class TrialStoppedError(RuntimeError):
    """The search stopped this trial."""


class StopFile(Callback):
    """Ends the training once the driver has written the stop file. Only rank 0 looks for this file."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._looked = 0.0

    def on_train_start(self, state: TrainingState) -> None:
        self._look(state)

    def on_step_end(self, state: TrainingState) -> None:
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            self._look(state)

    def on_epoch_end(self, state: TrainingState) -> None:
        self._look(state)

    def _look(self, state: TrainingState) -> None:
        if state.rank != 0:
            return
        self._looked = time.monotonic()
        # A store that fails for a moment must not end a training.
        with suppress(OSError):
            if not storage.exists(self._uri):
                return
            raise TrialStoppedError("the search stopped this trial")
