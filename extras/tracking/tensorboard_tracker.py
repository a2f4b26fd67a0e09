"""Writes event files for TensorBoard: scalars by step, the settings as text, and hparams."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ringspark.estimators import run_layout
from ringspark.estimators.tracking.base import (
    GROWTH,
    Listener,
    RunEnd,
    RunStart,
    Text,
    Tracker,
    check_options,
)
from ringspark.estimators.training.history import EpochRecord
from ringspark.estimators.training.step_log import StepRecord
from ringspark.pipelines import storage

FOLDER = "tensorboard"


@dataclass(frozen=True)
class TensorBoardTracker(Tracker):
    """Writes one folder per training.

    Attributes:
        log_dir: Local folder of the driver, with one folder per run in it. The name of a run's folder is the
            last part of the run's URI and a digest of the URI. If unset, events are written to
            `tracking/tensorboard` in the run directory.
    """

    name: ClassVar[str] = "tensorboard"
    log_dir: Text | None = None

    def check(self) -> None:
        check_options(self, package="tensorboard")

    def start(self, run: RunStart) -> Listener:
        if self.log_dir is not None:
            # A start removes old events, and URIs of several runs may end alike, hence the digest.
            digest = hashlib.sha256(run.run_uri.encode()).hexdigest()[:8]
            name = f"{run.run_uri.rstrip('/').rpartition('/')[2]}-{digest}"
            return _Events(run, str(Path(self.log_dir).expanduser().absolute() / name))
        return _Events(run, storage.join(run.run_uri, run_layout.TRACKING, FOLDER))


class _Events(Listener):
    def __init__(self, run: RunStart, target: str) -> None:
        # takes a second to import
        from torch.utils.tensorboard import SummaryWriter

        self._run, self._target = run, storage.normalize(target)
        self._is_local = storage.is_local(self._target)
        # A start receives the records of all earlier starts again.
        for name in storage.list_names(self._target):
            if name.startswith("events.out.tfevents"):
                storage.remove(storage.join(self._target, name))
        if self._is_local:
            self._folder = self._target.removeprefix("file://")
        else:
            self._temporary = tempfile.TemporaryDirectory(prefix="ringspark-", ignore_cleanup_errors=True)
            self._folder = self._temporary.name
        self._writer: Any = SummaryWriter(self._folder)
        self._epochs: dict[int, EpochRecord] = {}
        self._last_step = -1
        self._copied = 0
        settings = {**run.settings, **{f"data.{key}": value for key, value in run.data.items()}}
        self._writer.add_text("settings", _table(settings), 0)
        self._hparams = {n: v for n, v in settings.items() if isinstance(v, bool | int | float | str)}
        self._writer.flush()

    def steps(self, records: Sequence[StepRecord]) -> None:
        if records and records[0].step <= self._last_step:
            self._purge(records[0].step)
        for record in records:
            self._writer.add_scalar("step/train_loss", record.train_loss, record.step)
            self._writer.add_scalar("step/learning_rate", record.learning_rate, record.step)
            self._last_step = record.step
        # Local files are visible at once; a store gets whole files (`_copy`).
        self._writer.flush()

    def epoch(self, record: EpochRecord) -> None:
        step = sum(epoch.steps for number, epoch in self._epochs.items() if number < record.epoch)
        step += record.steps
        # Records of steps may have purged already.
        if record.epoch in self._epochs and step > self._last_step:
            self._purge(step)
        self._epochs[record.epoch] = record
        for name, value in _numbers(record).items():
            self._writer.add_scalar(f"epoch/{name}", value, step)
        self._writer.flush()
        self._copy(GROWTH)

    def end(self, end: RunEnd) -> None:
        from torch.utils.tensorboard import summary

        make_hparams: Any = summary.hparams
        last = self._epochs[max(self._epochs)] if self._epochs else None
        metrics = {f"hparam/{name}": value for name, value in _numbers(last).items()} if last else {}
        self._writer.add_text("end", end.status + (f": {end.error}" if end.error else ""), 0)
        # Not `add_hparams`, which creates another folder, that is another run.
        for part in make_hparams(self._hparams, metrics):
            self._writer.file_writer.add_summary(part)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, 0)
        self._writer.close()
        self._copy()
        if not self._is_local:
            self._temporary.cleanup()

    def _purge(self, step: int) -> None:
        """Marks a restart: TensorBoard drops the events of this step and later ones."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        restart = Event(step=step, session_log=SessionLog(status=SessionLog.START))
        self._writer.file_writer.add_event(restart, step)

    def _copy(self, growth: float = 0.0) -> None:
        files = [] if self._is_local else sorted(Path(self._folder).iterdir())
        size = sum(file.stat().st_size for file in files)
        if size < (1 + growth) * self._copied:
            return
        for file in files:
            storage.write_atomic(storage.join(self._target, file.name), file.read_bytes(), durable=False)
        self._copied = size


def _numbers(record: EpochRecord) -> dict[str, float]:
    return record.numbers() | {"seconds": record.seconds}


def _table(settings: Mapping[str, Any]) -> str:
    rows = [f"| {name} | {json.dumps(value, default=str)} |" for name, value in sorted(settings.items())]
    return "\n".join(["| setting | value |", "| --- | --- |", *rows])
