"""What a training keeps on its way, and what happens when something fails: Params, getters, setters."""

from __future__ import annotations

from typing import Any, TypeVar

from pyspark.ml.param import Params, TypeConverters

from ringspark.estimators.stages.converters import param, to_choice, to_count, to_interval, to_uri

Self = TypeVar("Self", bound=Params)


class _RecoveryParams(Params):
    """Checkpoints, resumption, restarts. Defaults stand in `__init__`."""

    checkpointEverySteps = param(
        "checkpointEverySteps",
        "optimizer steps between two checkpoints of the whole training; unset: not by steps",
        to_count("checkpointEverySteps"),
    )
    checkpointEverySeconds = param(
        "checkpointEverySeconds",
        "seconds between two checkpoints of the whole training, 0 for none by the clock",
        to_interval("checkpointEverySeconds"),
    )
    checkpointEveryEpochs = param(
        "checkpointEveryEpochs",
        "epochs between two checkpoints of the whole training; unset: not by epochs",
        to_count("checkpointEveryEpochs"),
    )
    keepCheckpoints = param(
        "keepCheckpoints",
        "newest checkpoints to keep while the training runs; with one alone, a damaged one loses the run",
        to_count("keepCheckpoints"),
    )
    onNonFinite = param(
        "onNonFinite",
        "what a step does whose loss or gradient is not finite: 'stop' (an error with epoch, step "
        "and worker), 'skip' (no worker takes the step) or 'rollback' (back to the last checkpoint, with "
        "half the rate)",
        to_choice("onNonFinite", "stop", "skip", "rollback"),
    )
    runUri = param(
        "runUri",
        "folder of this one training, which all workers reach; unset: a new folder in storageUri",
        to_uri,
    )
    resume = param(
        "resume",
        "whether to go on with the training that runUri holds, if it holds one; a run of other settings or "
        "other data is refused",
        TypeConverters.toBoolean,
    )
    maxRestarts = param(
        "maxRestarts",
        "how often lost workers are started again, from the last checkpoint, before fit fails",
        TypeConverters.toInt,
    )
    minWorkers = param(
        "minWorkers",
        "workers with which a restart may go on where the cluster has no room for numWorkers any more; "
        "unset: numWorkers",
        to_count("minWorkers"),
    )
    timeoutSeconds = param(
        "timeoutSeconds",
        "how long a worker may wait for the others in one operation, or stay without any progress",
        TypeConverters.toFloat,
    )

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._setDefault(
            checkpointEverySeconds=600.0,
            keepCheckpoints=2,
            onNonFinite="stop",
            resume=False,
            maxRestarts=3,
            timeoutSeconds=600.0,
        )

    def getCheckpointEverySteps(self) -> int | None:
        return (
            self.getOrDefault(self.checkpointEverySteps)
            if self.isDefined(self.checkpointEverySteps)
            else None
        )

    def setCheckpointEverySteps(self: Self, value: int) -> Self:
        return self._set(checkpointEverySteps=value)

    def getCheckpointEverySeconds(self) -> float:
        return float(self.getOrDefault(self.checkpointEverySeconds))

    def setCheckpointEverySeconds(self: Self, value: float) -> Self:
        return self._set(checkpointEverySeconds=value)

    def getCheckpointEveryEpochs(self) -> int | None:
        return (
            self.getOrDefault(self.checkpointEveryEpochs)
            if self.isDefined(self.checkpointEveryEpochs)
            else None
        )

    def setCheckpointEveryEpochs(self: Self, value: int) -> Self:
        return self._set(checkpointEveryEpochs=value)

    def getKeepCheckpoints(self) -> int:
        return int(self.getOrDefault(self.keepCheckpoints))

    def setKeepCheckpoints(self: Self, value: int) -> Self:
        return self._set(keepCheckpoints=value)

    def getOnNonFinite(self) -> str:
        return str(self.getOrDefault(self.onNonFinite))

    def setOnNonFinite(self: Self, value: str) -> Self:
        return self._set(onNonFinite=value)

    def getRunUri(self) -> str | None:
        return self.getOrDefault(self.runUri) if self.isDefined(self.runUri) else None

    def setRunUri(self: Self, value: str) -> Self:
        return self._set(runUri=value)

    def getResume(self) -> bool:
        return bool(self.getOrDefault(self.resume))

    def setResume(self: Self, value: bool) -> Self:
        return self._set(resume=value)

    def getMaxRestarts(self) -> int:
        return int(self.getOrDefault(self.maxRestarts))

    def setMaxRestarts(self: Self, value: int) -> Self:
        return self._set(maxRestarts=value)

    def getMinWorkers(self) -> int | None:
        return self.getOrDefault(self.minWorkers) if self.isDefined(self.minWorkers) else None

    def setMinWorkers(self: Self, value: int) -> Self:
        return self._set(minWorkers=value)

    def getTimeoutSeconds(self) -> float:
        return float(self.getOrDefault(self.timeoutSeconds))

    def setTimeoutSeconds(self: Self, value: float) -> Self:
        return self._set(timeoutSeconds=value)
