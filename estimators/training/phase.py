"""The phase that a rank is in, for the error message if it stops there."""

from __future__ import annotations

from ringspark.estimators.failures import WorkerStoppedError


class Status:
    """The rank's present phase; if `ticks` does not rise for `timeoutSeconds`, the rank counts as hung.

    `must_regroup`, on rank 0: whether all ranks are to end at a checkpoint, to start again with more ranks.
    """

    must_regroup = False

    def __init__(self, phase: str = "starting") -> None:
        self._phase = phase
        self._stop: str | None = None
        self.ticks = 0

    @property
    def phase(self) -> str:
        return self._phase

    @phase.setter
    def phase(self, value: str) -> None:
        self.tick()
        self._phase = value

    def tick(self) -> None:
        """Counts a sign of progress within a phase. Raises WorkerStoppedError after `stop`."""
        if self._stop is not None:
            raise WorkerStoppedError(self._stop)
        self.ticks += 1

    def stop(self, reason: str) -> None:
        """Ends the work at its next sign of progress; any thread may call it."""
        self._stop = reason
