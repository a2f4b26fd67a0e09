"""The interface of a part: its cases, and one row of figures per case."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch

Value = str | float | int | None
"""A figure of a row; None if this device cannot measure it."""


class SkippedError(Exception):
    """A case cannot run here, and nothing is wrong; the message says what is missing."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The device and the sizes of one run.

    Attributes:
        is_tiny: Use sizes that take seconds on a CPU and measure nothing.
        is_short: Run only a few of the tests.
        is_cut: The part has less time than its own limit.
        folder: Empty folder of this part for shards and runs.
        rounds: Measured rounds per case.
        seconds: Time limit of the part.
    """

    device: str
    is_tiny: bool
    is_short: bool
    folder: Path
    is_cut: bool = False
    rounds: int = 5
    seconds: float = 60.0

    @property
    def torch_device(self) -> torch.device:
        import torch

        return torch.device(self.device)

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")


class Part(ABC):
    """One part of the check. A process makes it once, and measures its cases one after another.

    Attributes:
        columns: Names of a row's figures, without the name of the case.
        note: What the figures mean, in Markdown.
    """

    columns: ClassVar[tuple[str, ...]]
    note: ClassVar[str]

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    @abstractmethod
    def cases(self) -> Sequence[str]:
        """Returns the names of the cases; runs before torch touches the device."""

    @abstractmethod
    def measure(self, case: str) -> Sequence[Value]:
        """Returns one value per column. Raises `SkippedError` if the case cannot run here."""
