"""`training.json`: what a checkpoint says of a training without a tensor.

The file may be damaged or anybody's: whatever it holds, reading it ends in a `Record` or a ValueError.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from ringspark.estimators.training.history import EpochRecord
from ringspark.estimators.training.non_finite import NonFiniteStep

FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class FileSum:
    """What a file must be: its length, and the SHA-256 of its bytes in hex."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a training stands, and how it came there.

    Attributes:
        epoch: Present epoch as callbacks see it, from 1; 0 before the first.
        step: Optimizer steps taken.
        finished_epochs: Those with a record in the history.
        step_in_epoch: Steps taken of the epoch after those.
        steps_per_epoch: Of this data and batch size; 0 where nobody asks.
        seconds: That the training took so far, over all its continuations.
        epoch_seconds: The same for the present epoch.
        skipped_before: Steps skipped before the present epoch.
        scaler: `LossScaler.state_dict`.
        rate_scales: `Rates.scales`.
        resumed_steps: Steps at which the training was continued.
        non_finite: What `onNonFinite` had to do so far.
    """

    epoch: int = 0
    step: int = 0
    finished_epochs: int = 0
    step_in_epoch: int = 0
    steps_per_epoch: int = 0
    seconds: float = 0.0
    epoch_seconds: float = 0.0
    skipped_before: int = 0
    scaler: dict[str, Any] = field(default_factory=dict)
    rate_scales: tuple[float, ...] = ()
    resumed_steps: tuple[int, ...] = ()
    non_finite: tuple[NonFiniteStep, ...] = ()
    history: tuple[EpochRecord, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Record:
    """The whole file.

    Attributes:
        optimizer: Name of its class.
        optimizer_values: Parameter -> key -> what is no tensor.
        optimizer_groups: What the parameter groups hold besides parameters and rates.
        ranks: One entry per rank: positions of its random numbers, states of its callbacks.
        files: Name -> what it must be.
    """

    position: Position
    optimizer: str = ""
    optimizer_values: dict[str, dict[str, Any]] = field(default_factory=dict)
    optimizer_groups: list[dict[str, Any]] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, FileSum] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def with_files(self, files: Mapping[str, FileSum]) -> Record:
        """The record once the files are written."""
        return replace(self, files=dict(files))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes | str, name: str = "training.json") -> Record:
        """Reads the file `name`.

        Raises:
            ValueError: It is damaged, or a newer version of the format wrote it.
        """
        try:
            values = json.loads(text)
            version = values["format_version"]
            if isinstance(version, int) and version > FORMAT_VERSION:
                raise ValueError(f"format {version}, this ringspark reads up to {FORMAT_VERSION}")
            record = cls(
                **{
                    **values,
                    "position": _position(values["position"]),
                    "files": {key: FileSum(**entry) for key, entry in values["files"].items()},
                }
            )
            _check(record)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{name} is damaged ({error}); take another training state") from error
        return record


def _position(values: dict[str, Any]) -> Position:
    known = {f.name for f in fields(Position)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(f"unknown entry {unknown[0]!r}")
    position = Position(
        **{
            **values,
            "rate_scales": tuple(float(scale) for scale in values["rate_scales"]),
            "resumed_steps": tuple(int(step) for step in values["resumed_steps"]),
            "non_finite": tuple(NonFiniteStep.from_values(entry) for entry in values["non_finite"]),
            "history": tuple(EpochRecord(**entry) for entry in values["history"]),
        }
    )
    counts = ("epoch", "step", "finished_epochs", "step_in_epoch", "steps_per_epoch", "skipped_before")
    for name in counts:
        value = getattr(position, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{name} must be a whole number from 0, got {value!r}")
    for name in ("seconds", "epoch_seconds"):
        value = getattr(position, name)
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a number from 0, got {value!r}")
    if not isinstance(position.scaler, dict):
        raise ValueError("scaler must be an object")
    return position


def _check(record: Record) -> None:
    if not isinstance(record.optimizer, str):
        raise ValueError("optimizer must be a text")
    for name in ("optimizer_values", "files"):
        if not isinstance(getattr(record, name), dict):
            raise ValueError(f"{name} must be an object")
    if not all(isinstance(own, dict) for own in record.optimizer_values.values()):
        raise ValueError("optimizer_values must hold objects")
    for name in ("optimizer_groups", "ranks"):
        entries = getattr(record, name)
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise ValueError(f"{name} must be a list of objects")
    for key, entry in record.files.items():
        if not isinstance(entry.bytes, int) or not isinstance(entry.sha256, str):
            raise ValueError(f"files has no size and sum of {key!r}")
