"""Chooses the best epoch, and members of an ensemble; all ranks see the same numbers and decide the same."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, runtime_checkable

from torch import nn

from ringspark.estimators import run_layout
from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.estimators.training.checkpoint.weights import save_together
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.history import EpochRecord
from ringspark.estimators.training.objective.own_metrics import find_metric, is_higher_better
from ringspark.estimators.training.phase import Status
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.pipelines import storage
from ringspark.pipelines.folder_removal import discard


class BestEpoch(Callback):
    """Keeps the best value of the config's `monitor`, and its `epoch`, which is 0 before the first epoch."""

    def __init__(self, config: TrainConfig, min_delta: float = 0.0) -> None:
        self.monitor = config.monitor
        self.epoch = 0
        self.value = math.nan
        _, name = config.monitor.split("_", 1)
        metric = find_metric(name, config.metrics)
        self._sign = 1.0 if metric is not None and is_higher_better(metric, config.own_metrics) else -1.0
        self._min_delta = min_delta

    def update(self, record: EpochRecord) -> bool:
        """Returns whether an epoch is better than all before; if so, keeps it. NaN is never better."""
        value = record.value(self.monitor)
        if math.isnan(value):
            return False
        if self.epoch and not self._sign * (value - self.value) > self._min_delta:
            return False
        self.epoch, self.value = record.epoch, value
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "value": None if math.isnan(self.value) else self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = int(state["epoch"])
        self.value = math.nan if state["value"] is None else float(state["value"])


class EarlyStopping(BestEpoch):
    """Stops when the monitored value has not improved for `patience` epochs (Prechelt 1998)."""

    def __init__(self, config: TrainConfig, patience: int) -> None:
        super().__init__(config, config.min_delta)
        self._patience = patience

    def on_epoch_end(self, state: TrainingState) -> None:
        record = state.history[-1]
        if self.update(record) or record.epoch - self.epoch < self._patience:
            return
        reason = f"did not improve on {self.value:.6g} of epoch {self.epoch} for {self._patience} epochs"
        if not self.epoch:
            reason = f"was not a number in {record.epoch} epochs"
        state.stop(f"{self.monitor} {reason}")


class TimeBudget(Callback):
    """Stops before an epoch that would exceed the config's budget, if it took as long as the last one."""

    def __init__(self, seconds: float, elapsed: Callable[[], float]) -> None:
        self._seconds, self._elapsed = seconds, elapsed

    def on_epoch_end(self, state: TrainingState) -> None:
        if state.step < state.num_steps and self._elapsed() + state.history[-1].seconds > self._seconds:
            state.stop(f"timeBudgetSeconds={self._seconds:g} left no time for another epoch")


@runtime_checkable
class Pack(Protocol):
    """A network that is an ensemble of small networks, its members; see `TabPack`."""

    def choose_on(self, batches: Iterable[Batch], data: Collective, *, is_classes: bool, loss: str) -> None:
        """Chooses the same members on all ranks of `data`, by held-out rows. Runs on every rank.

        `loss` is the name of the training's loss.
        """


@contextmanager
def calibrated(module: nn.Module, record: EpochRecord | None) -> Iterator[None]:
    """Gives the network the temperature in `record`, clamped to 0.5 to 4, while the context is open.

    Guo, Pleiss, Sun and Weinberger 2017, "On Calibration of Modern Neural Networks". The training itself
    continues with a temperature of 1. Networks without the attribute `calibrates` are not changed.
    """
    found = math.nan if record is None else record.metrics.get("validation_temperature", math.nan)
    if not getattr(module, "calibrates", False) or not math.isfinite(found):
        yield
        return
    temperature: Any = module.temperature
    # Held-out rows that are all right ask for no doubt at all.
    temperature.fill_(min(4.0, max(0.5, found)))
    try:
        yield
    finally:
        temperature.fill_(1.0)


class BestCheckpoint(BestEpoch):
    """Writes the weights of the best epoch so far, and removes the folder of the previous best epoch."""

    def __init__(
        self, config: TrainConfig, mesh: RankMesh, status: Status, keeps_worse: bool = False
    ) -> None:
        super().__init__(config)
        self._root = storage.join(config.run_uri, run_layout.BEST)
        self._mesh, self._status, self._keeps_worse = mesh, status, keeps_worse
        self.uri: str | None = None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # The folder is derived from the epoch, because no path may come from a file.
        super().load_state_dict(state)
        self.uri = self._folder() if self.epoch else None

    def _folder(self) -> str:
        return f"{self._root}-{self.epoch}"

    def on_epoch_end(self, state: TrainingState) -> None:
        if not self.update(state.history[-1]):
            return
        last, self.uri = self.uri, self._folder()
        where = {"epoch": state.epoch, "step": state.step}
        with state.averaged(), calibrated(state.module, state.history[-1]):
            save_together(self.uri, state.module, self._mesh, self._status.tick, **where)
        if self._mesh.writes and last is not None and not self._keeps_worse:
            discard(last, run_layout.PARTS)

    def remove_others(self) -> None:
        parent, _, prefix = self._root.rpartition("/")
        kept = "" if self.uri is None else self.uri.rpartition("/")[2]
        with suppress(OSError):
            for name in storage.list_names(parent):
                if re.fullmatch(rf"{re.escape(prefix)}-[0-9]+", name) and name != kept:
                    discard(storage.join(parent, name), run_layout.PARTS)
