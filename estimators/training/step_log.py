"""Records the loss within an epoch: one mean over all ranks every few steps.

A resumed training may repeat steps. A record of step n replaces earlier records of step n and later steps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial

import torch

from ringspark.estimators import run_layout
from ringspark.estimators.collectives import Collective
from ringspark.estimators.training.objective.sums import Sums
from ringspark.estimators.training.observation.background_file import BackgroundFile
from ringspark.pipelines import storage
from ringspark.pipelines.typed_json import fit, parse

# Least seconds between two files.
WRITE_SECONDS = 0.5
# Least share of the training's time between two files: a long training has hundreds of them, not thousands.
WRITE_SHARE = 0.01


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The steps since the previous record; `rows` and `seconds` count from the training's start."""

    step: int
    epoch: int
    rows: int
    seconds: float
    train_loss: float
    learning_rate: float


class StepLog:
    """Takes a record every `every` steps (0 for none) on every rank; rank 0 writes them."""

    def __init__(self, run_uri: str, writes: bool, every: int) -> None:
        self._folder = storage.join(run_uri, run_layout.STEPS)
        self._file = BackgroundFile(self._folder, "file of losses within an epoch")
        self._writes = writes
        self._every = every
        self._before: torch.Tensor | None = None
        self._pending: list[StepRecord] = []
        self._number: int | None = None
        self._begun = self._written = time.monotonic()

    def begin(self, sums: Sums) -> None:
        self._before = sums.totals() if self._every else None

    def is_due(self, step: int) -> bool:
        """Returns whether to record after this step, the same on every rank."""
        return self._every > 0 and step % self._every == 0

    def mean_loss(self, sums: Sums, data: Collective | None) -> float | None:
        """Returns the mean loss since the previous record, over all ranks of the collective `data`.

        If `data` is None, returns this rank's mean loss, or None if this rank had no rows.
        """
        totals = sums.totals()
        since = totals if self._before is None else totals - self._before
        if data is None and not since.any():
            return None
        self._before = totals
        return sums.mean_loss(since, data)

    def add(self, record: StepRecord) -> None:
        """Keeps a record, and starts a write if one is due."""
        if not self._writes:
            return
        self._pending.append(record)
        now = time.monotonic()
        if now - self._written >= max(WRITE_SECONDS, WRITE_SHARE * (now - self._begun)):
            self._start()

    def flush(self) -> None:
        self._file.join()
        if self._pending:
            self._start()
            self._file.join()

    def _start(self) -> None:
        if not self._file.is_busy:
            records, self._pending, self._written = self._pending, [], time.monotonic()
            self._file.run(partial(self._write, records))

    def _write(self, records: list[StepRecord]) -> None:
        if self._number is None:
            # An earlier start may have left files.
            self._number = max(map(_number, storage.list_names(self._folder)), default=-1) + 1
        text = json.dumps([asdict(record) for record in records])
        uri = storage.join(self._folder, f"{self._number}.json")
        storage.write_atomic(uri, text.encode(), durable=False)
        self._number += 1


class StepFiles:
    """Reader of a run's files of step records; the training may still write more files."""

    def __init__(self, run_uri: str) -> None:
        self._folder = storage.join(run_uri, run_layout.STEPS)
        self._next = 0

    def read_new(self) -> Iterator[list[StepRecord]]:
        """Yields the records of each unread file in order."""
        for number in sorted(map(_number, storage.list_names(self._folder))):
            if number >= self._next:
                records = _read(storage.join(self._folder, f"{number}.json"))
                self._next = number + 1
                yield records


def read_steps(run_uri: str) -> list[StepRecord]:
    """Returns the records, each step once."""
    steps: dict[int, StepRecord] = {}
    for records in StepFiles(run_uri).read_new():
        if records:
            steps = {step: record for step, record in steps.items() if step < records[0].step}
            steps |= {record.step: record for record in records}
    return list(steps.values())


def _read(uri: str) -> list[StepRecord]:
    data = storage.read_bytes(uri)
    try:
        # A loss that overflowed is stored as NaN.
        records: list[StepRecord] = fit(list[StepRecord], parse(data, allow_nan=True), "records")
    except ValueError as error:
        raise ValueError(f"{uri} is damaged ({error}); remove it to see the other records") from None
    return records


def _number(name: str) -> int:
    """Returns the number in a file's name, -1 for other names."""
    with suppress(ValueError):
        return int(name.removesuffix(".json"))
    return -1
