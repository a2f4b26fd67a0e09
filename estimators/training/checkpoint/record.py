"""`training.json`: what a checkpoint says of a training without a tensor.

The file may be damaged or anybody's: whatever it holds, reading it ends in a `Record` or a ValueError.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ringspark.estimators.training.history import EpochRecord
from ringspark.estimators.training.non_finite import NonFiniteStep
from ringspark.pipelines.typed_json import NewerFormatError, record, versioned

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

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not 0 <= value < math.inf:
                raise ValueError(f"{name} must be a number from 0, got {value}")


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
            # A loss that overflowed is NaN in the history.
            return record(cls, versioned(text, FORMAT_VERSION, allow_nan=True))
        except NewerFormatError as error:
            raise ValueError(f"{name} cannot be read: {error}") from None
        except (ValueError, OverflowError) as error:
            raise ValueError(f"{name} is damaged ({error}); take another training state") from error
