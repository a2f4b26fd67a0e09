"""Stops a training by a file that the driver writes into its run folder.

The training then ends with an error, like an error of user code; no process is killed.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress

from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.pipelines import storage

# Seconds between two checks, because a store may be slow.
LOOK_SECONDS = 0.25


class StopFile(Callback):
    """Ends the training once the driver has written the stop file. Only rank 0 looks for this file."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._looked = -math.inf

    def on_step_end(self, state: TrainingState) -> None:
        now = time.monotonic()
        if state.rank != 0 or now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        # A store that fails for a moment must not end a training.
        with suppress(OSError):
            if storage.exists(self._uri):
                raise RuntimeError("the search stopped this trial")
