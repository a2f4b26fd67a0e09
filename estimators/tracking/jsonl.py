"""Writes a training as lines of JSON into its run directory, or into a local file of the driver."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from ringspark.estimators import run_layout
from ringspark.estimators.tracking.base import GROWTH, Listener, RunEnd, RunStart, Tracker
from ringspark.estimators.training.history import EpochRecord
from ringspark.estimators.training.step_log import StepRecord
from ringspark.pipelines import storage

FILE = "events.jsonl"


@dataclass(frozen=True)
class JsonLinesTracker(Tracker):
    """Writes one JSON object per line: "event" is "start", "step", "epoch" or "end"; NaN is null.

    Attributes:
        path: Local file of the driver, to which each line is appended at once. If unset, the file is
            `tracking/events.jsonl` in the run directory. Stores cannot append, so this file is rewritten at
            the end, and after an epoch if it has grown by a tenth.
    """

    name: ClassVar[str] = "jsonl"
    path: str | None = None

    def check(self) -> None:
        """Raises ValueError if `path`, which may come from a saved stage, is a file of another program."""
        if self.path is not None and (not isinstance(self.path, str) or Path(self.path).is_dir()):
            raise ValueError(f"tracking: path of 'jsonl' must be a local file, got {self.path!r}; give one")
        line = b""
        with suppress(FileNotFoundError):
            if self.path:
                with Path(self.path).open("rb") as file:
                    line = file.readline()
        if line and not line.startswith(b'{"run": '):
            raise ValueError(
                f"tracking: path {self.path!r} of 'jsonl' is a file of another program; give a new file"
            )

    def start(self, run: RunStart) -> Listener:
        uri = storage.join(run.run_uri, run_layout.TRACKING, FILE)
        listener = _Lines(run.name, uri, Path(self.path) if self.path else None)
        facts = {"run_uri": run.run_uri, "settings": dict(run.settings), "data": dict(run.data)}
        listener.write([{"event": "start", **facts, "resumed": run.resumed}])
        return listener


class _Lines(Listener):
    def __init__(self, run: str, uri: str, path: Path | None) -> None:
        self._run, self._uri, self._path = run, uri, path
        self._lines: list[str] = []
        self._size = self._written = 0

    def write(self, events: Sequence[dict[str, Any]], growth: float = 0.0) -> None:
        lines = [json.dumps({"run": self._run} | _finite(event), allow_nan=False) for event in events]
        text = "".join(f"{line}\n" for line in lines)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(text)
            return
        self._lines.append(text)
        self._size += len(text)
        if self._size >= (1 + growth) * self._written:
            storage.write_atomic(self._uri, "".join(self._lines).encode(), durable=False)
            self._written = self._size

    def steps(self, records: Sequence[StepRecord]) -> None:
        self.write([{"event": "step", **asdict(record)} for record in records], growth=math.inf)

    def epoch(self, record: EpochRecord) -> None:
        self.write([{"event": "epoch", **asdict(record)}], growth=GROWTH)

    def end(self, end: RunEnd) -> None:
        self.write([{"event": "end", "status": end.status, "error": end.error}])


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
