"""Who is told of a training: a `Tracker` is the settings, and its `Listener` follows one training.

All of it runs on the driver, in a thread of each listener's own (see `watcher`), because the driver waits in
a Spark job and may have no connection to the ranks: what is told was read from the run directory's files.
So a listener may be slow, and what it raises is a warning and ends no training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, Literal

from ringspark.estimators.training.history import EpochRecord, TrainingProgress
from ringspark.estimators.training.step_log import StepRecord

Status = Literal["finished", "failed", "cancelled"]

# Stores cannot append to a file. Writing it again after every epoch costs the square of the number of epochs.
# So a tracker writes it again only if it has grown by this share, and at the end.
GROWTH = 0.1


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """What is known when the workers start.

    Attributes:
        name: Uid of the stage, such as "TorchClassifier_1f2e".
        run_uri: Folder of the run.
        settings: The stage's Params by name: numbers, texts and lists of them as they are, all else as text.
        data: Facts of the rows: "rows", "validation_rows", "shards_uri".
        resumed: Whether the folder holds a part of this training already.
        surroundings: What the trackers' `surroundings` found where `fit` was called.
    """

    name: str
    run_uri: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    resumed: bool = False
    surroundings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """How the training ended.

    Attributes:
        error: The failure's sentence, if it did not finish.
        model: The fitted stage, if it finished.
    """

    status: Status
    error: str = ""
    model: Any = None


class Listener:
    """Follows one training. The calls come one after another, from one thread; each may raise."""

    def progress(self, progress: TrainingProgress) -> None:
        """Is told the present position about twice a second; positions are left out while calls are slow."""

    def steps(self, records: Sequence[StepRecord]) -> None:
        """Is told of records of steps, each once; again only if a rollback or restart gave other numbers."""

    def epoch(self, record: EpochRecord) -> None:
        """Is told of a finished epoch, once; again only if a rollback gave other numbers."""

    def end(self, end: RunEnd) -> None:
        """Is told last how the training ended, unless the driver was killed."""


class Tracker:
    """The settings of a kind of listener. One tracker serves many trainings, also at the same time.

    A tracker of this package is a frozen dataclass of plain values and is saved with its stage as
    `{"name": ..., **options}`.
    """

    name: ClassVar[str] = ""

    def start(self, run: RunStart) -> Listener:
        """Begins to follow a training."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises ValueError, with the remedy, if this tracker cannot work here. Runs before the training."""

    def surroundings(self) -> dict[str, str]:
        """Returns what `start` needs to know of the calling thread, such as an active run; else nothing.

        Runs in the thread that calls `fit`, and where a stage is copied: a CrossValidator copies in its
        caller's thread, and fits in threads of a pool. It must be quick and ask no server.
        """
        return {}

    def as_setting(self) -> dict[str, Any] | None:
        """Returns name and options that differ from their defaults; None if they are no plain data."""
        # A user's own class may have a name and be no dataclass.
        if not self.name or not is_dataclass(self):
            return None
        options = {f.name: getattr(self, f.name) for f in fields(self)}
        defaults = {f.name: f.default for f in fields(self)}
        return {"name": self.name} | {k: v for k, v in options.items() if v != defaults[k]}
