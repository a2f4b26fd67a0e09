"""Finds the best epoch by one entry of the history, to stop a training early and to keep its weights.

Every rank sees the same numbers and makes the same decision without asking the others.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from typing import Any

from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.estimators.training.checkpoint.weights import assist_checkpoint, save_checkpoint
from ringspark.estimators.training.history import EpochRecord
from ringspark.estimators.training.objective.metrics import metric_info
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.pipelines import storage


class Best:
    """Keeps the best value of one entry of the history.

    Attributes:
        epoch: The epoch of the best value, 0 before the first.
    """

    def __init__(self, monitor: str, higher_is_better: bool, min_delta: float = 0.0) -> None:
        self.monitor = monitor
        self.epoch = 0
        self.value = math.nan
        self._sign = 1.0 if higher_is_better else -1.0
        self._min_delta = min_delta

    def improves(self, record: EpochRecord) -> bool:
        """Notes an epoch; returns whether it is better than all before by more than `min_delta`.

        NaN is never better: an epoch whose metric is undefined does not win.
        """
        value = record.value(self.monitor)
        if math.isnan(value):
            return False
        if self.epoch and not self._sign * (value - self.value) > self._min_delta:
            return False
        self.epoch, self.value = record.epoch, value
        return True

    def state_dict(self) -> dict[str, Any]:
        """Returns epoch and value in JSON's types."""
        return {"epoch": self.epoch, "value": None if math.isnan(self.value) else self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the result of `state_dict`."""
        self.epoch = int(state["epoch"])
        self.value = math.nan if state["value"] is None else float(state["value"])


class EarlyStopping(Callback):
    """Stops when the monitored value has not improved for `patience` epochs (Prechelt 1998)."""

    def __init__(self, best: Best, patience: int) -> None:
        self._best = best
        self._patience = patience

    def state_dict(self) -> dict[str, Any]:
        return self._best.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._best.load_state_dict(state)

    def on_epoch_end(self, state: TrainingState) -> None:
        record = state.history[-1]
        if self._best.improves(record) or record.epoch - self._best.epoch < self._patience:
            return
        if not self._best.epoch:
            state.stop(f"{self._best.monitor} was not a number in {record.epoch} epochs")
            return
        state.stop(
            f"{self._best.monitor} did not improve on {self._best.value:.6g} of epoch {self._best.epoch} "
            f"for {self._patience} epochs"
        )


def best_of(config: TrainConfig, min_delta: float = 0.0) -> Best:
    """Returns the best value of the config's `monitor`, which `check_training` has resolved."""
    _, name = config.monitor.split("_", 1)
    # With several labels the name is the metric, "_", the label.
    metric = next((m for m in config.metrics if name == m or name.startswith(f"{m}_")), None)
    return Best(config.monitor, metric is not None and metric_info(metric).higher_is_better, min_delta)


class BestCheckpoint(Callback):
    """Writes the weights of the best epoch so far.

    The folder of a worse epoch is removed then. If checkpoints of the whole training are written, it is
    removed only at the end, because an older checkpoint may name it as the best so far.

    Attributes:
        uri: Folder of the best checkpoint, None before the first.
    """

    def __init__(self, best: Best, root: str, writes: bool, keeps_worse: bool = False) -> None:
        """Args: writes: Whether this rank writes the weights; the others send it their parts."""
        self._best = best
        self._root = root
        self._writes = writes
        self._keeps_worse = keeps_worse
        self.uri: str | None = None

    @property
    def epoch(self) -> int:
        return self._best.epoch

    def state_dict(self) -> dict[str, Any]:
        return self._best.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # The folder follows from the epoch, because no path may come from a file.
        self._best.load_state_dict(state)
        self.uri = self._folder() if self._best.epoch else None

    def _folder(self) -> str:
        return f"{self._root}-{self._best.epoch}"

    def on_epoch_end(self, state: TrainingState) -> None:
        if not self._best.improves(state.history[-1]):
            return
        last, self.uri = self.uri, self._folder()
        if self._writes:
            save_checkpoint(self.uri, state.module, epoch=state.epoch, step=state.step)
            if last is not None and not self._keeps_worse:
                with suppress(OSError):
                    storage.remove(last, recursive=True)
        else:
            assist_checkpoint(state.module)

    def remove_others(self) -> None:
        """Removes the folders of all worse epochs, also those of an earlier attempt. Runs on rank 0."""
        parent, _, prefix = self._root.rpartition("/")
        kept = "" if self.uri is None else self.uri.rpartition("/")[2]
        with suppress(OSError):
            for name in storage.list_names(parent):
                if re.fullmatch(rf"{re.escape(prefix)}-[0-9]+", name) and name != kept:
                    storage.remove(storage.join(parent, name), recursive=True)
