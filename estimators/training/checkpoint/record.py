"""`training.json`: everything in a checkpoint that is no tensor.

The file may be damaged or untrusted: reading it ends in a `Record` or a ValueError, whatever it holds.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, field
from typing import Any

from ringspark.estimators.parallel.cut import Spread
from ringspark.estimators.training.history import EpochRecord
from ringspark.estimators.training.non_finite import NonFiniteStep
from ringspark.pipelines.typed_json import OtherFormatError, added, record, versioned

FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class FileSum:
    """The expected length of a file, and the SHA-256 of its bytes in hex."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Position:
    """The position of a training, and the history up to it.

    Attributes:
        epoch: Number of the current epoch as callbacks see it, from 1; 0 before the first.
        step: Optimizer steps taken.
        finished_epochs: Epochs with a record in the history.
        step_in_epoch: Steps done in the current epoch.
        steps_per_epoch: Optimizer steps of the current epoch with this data and batch size; 0 if unknown.
        seconds: Training time so far, in seconds, over all continuations.
        epoch_seconds: Training time in the current epoch so far, in seconds.
        skipped_before: Steps skipped before the current epoch.
        scaler: Result of `LossScaler.state_dict`.
        rate_scales: Value of `Rates.scales`.
        resumed_steps: Steps from which the training was resumed.
        non_finite: The first steps that `onNonFinite` handled.
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
        optimizer: Name of the optimizer's class.
        optimizer_values: Parameter -> key -> state value that is no tensor.
        optimizer_groups: Values of the parameter groups, without parameters and rates.
        ranks: One entry per rank: positions of its random numbers, states of its callbacks.
        files: Name -> expected length and digest.
        num_parts: Into how many files weights, optimizer's state and average are written each.
        spreads: File of one part -> tensor -> how the pieces in the parts make up the whole.
        token: What the names of the parts carry, see `parts`; hexadecimal digits.
    """

    position: Position
    optimizer: str = ""
    optimizer_values: dict[str, dict[str, Any]] = field(default_factory=dict)
    optimizer_groups: list[dict[str, Any]] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, FileSum] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION
    num_parts: int = added(1)
    spreads: dict[str, dict[str, Spread]] = field(default_factory=dict, metadata={"added": True})
    token: str = added("")

    def __post_init__(self) -> None:
        # It becomes part of the name of a file.
        if not re.fullmatch("[0-9a-f]{0,16}", self.token):
            raise ValueError(f"token must be up to 16 hexadecimal digits, got {self.token[:40]!r}")

    def to_json(self) -> str:
        values = asdict(self)
        if self.num_parts == 1:
            # As ever, so that an older ringspark reads it.
            del values["num_parts"], values["spreads"], values["token"]
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: bytes | str, name: str = "training.json") -> Record:
        """Reads the file `name`.

        Raises:
            OtherFormatError: Another version of the format wrote it.
            ValueError: It is damaged.
        """
        try:
            # A loss that overflowed is stored as NaN in the history.
            return record(cls, versioned(text, FORMAT_VERSION, allow_nan=True))
        except OtherFormatError as error:
            raise OtherFormatError(f"{name} cannot be read: {error}") from None
        except (ValueError, OverflowError) as error:
            raise ValueError(f"{name} is damaged ({error}); take another training state") from error
