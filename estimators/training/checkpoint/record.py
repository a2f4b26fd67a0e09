"""`training.json`: everything in a checkpoint that is not a tensor.

Reading returns a `Record` or raises ValueError, whatever a damaged or untrusted file holds.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

from ringspark.estimators.parallel.shard_spec import CheckpointShards
from ringspark.estimators.training.history import EpochRecord
from ringspark.estimators.training.non_finite import NonFiniteStep
from ringspark.pipelines.typed_json import JsonText, OtherFormatError, record, versioned

FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class FileSum:
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Position:
    """The position of a training, and its history.

    Attributes:
        epoch: Number of the current epoch, from 1; 0 before the first.
        steps_per_epoch: Steps of the current epoch with this data and batch size; 0 if unknown.
        seconds: Training time over all continuations.
        first_rate_step, rate_pace: `first_step` and `pace` of `LearningRates`.
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
    first_rate_step: int = 0
    rate_pace: tuple[float, ...] = ()
    resumed_steps: tuple[int, ...] = ()
    non_finite: tuple[NonFiniteStep, ...] = ()
    history: tuple[EpochRecord, ...] = ()

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not 0 <= value < math.inf:
                raise ValueError(f"{name} must be a number from 0, got {value}")


@dataclass(frozen=True, kw_only=True)
class Record(JsonText):
    """The content of a checkpoint's record file.

    Attributes:
        optimizer_values: Parameter -> key of the optimizer state -> value, for values that are not tensors.
        spreads: File name without the number of the shard -> name of a split tensor -> pieces of the tensor.
        token: Token in the file names of shards, see `shards`.
    """

    position: Position
    optimizer: str = ""
    optimizer_values: dict[str, dict[str, Any]] = field(default_factory=dict)
    optimizer_groups: list[dict[str, Any]] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, FileSum] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION
    num_parts: int = 1
    spreads: dict[str, dict[str, CheckpointShards]] = field(default_factory=dict)
    token: str = ""

    def __post_init__(self) -> None:
        # The token becomes part of a file name.
        if not re.fullmatch("[0-9a-f]{0,16}", self.token):
            raise ValueError(f"token must be up to 16 hexadecimal digits, got {self.token[:40]!r}")

    @classmethod
    def from_json(cls, text: bytes | str, name: str = "training.json") -> Record:
        """Parses the file, which messages call `name`. Raises ValueError if it is damaged."""
        try:
            # A loss that overflowed is stored as NaN in the history.
            return record(cls, versioned(text, FORMAT_VERSION, allow_nan=True))
        except OtherFormatError as error:
            raise OtherFormatError(f"{name} cannot be read: {error}") from None
        except (ValueError, OverflowError) as error:
            raise ValueError(f"{name} is damaged ({error}); use another checkpoint") from error
