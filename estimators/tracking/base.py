"""The interface of trackers: a `Tracker` holds the settings, and its `Listener` follows one training.

Each listener runs in a separate thread of the driver. Its errors become warnings that end no training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Literal

from ringspark.estimators.options.checked import Rule, check
from ringspark.estimators.options.declare import hints_of
from ringspark.estimators.training.history import EpochRecord, TrainingProgress
from ringspark.estimators.training.step_log import StepRecord

Text = Annotated[str, Rule(bool, "be a non-empty string")]
EndStatus = Literal["finished", "failed", "cancelled"]

# Stores cannot append to a file, and rewriting it after every epoch takes quadratic time. So a tracker
# rewrites it only if it has grown by this share, and at the end.
GROWTH = 0.1


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """Facts that are known when the workers start.

    Attributes:
        name: Uid of the stage, such as "TorchClassifier_1f2e".
        settings: The stage's Params by name: numbers, texts and lists of them unchanged, others as text.
        data: Facts about the rows: "rows", "validation_rows", "shards_uri".
        resumed: Whether the folder already holds a part of this training.
        surroundings: Result of the trackers' `surroundings` in the thread that called `fit`.
        changes: One sentence per setting that this resume changed.
    """

    name: str
    run_uri: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    resumed: bool = False
    surroundings: Mapping[str, str] = field(default_factory=dict)
    changes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """The end of a training.

    Attributes:
        error: One sentence about the failure, if the training did not finish.
        model: The fitted stage, if it finished.
    """

    status: EndStatus
    error: str = ""
    model: Any = None


class Listener:
    """Follows one training. One thread makes the calls in sequence; each may raise."""

    def progress(self, progress: TrainingProgress) -> None:
        """Receives the present position about twice a second; positions are skipped while calls are slow."""

    def steps(self, records: Sequence[StepRecord]) -> None:
        """Receives records of steps. Each comes once, and again if a rollback or restart changed it."""

    def epoch(self, record: EpochRecord) -> None:
        """Receives a finished epoch. Each comes once, and again if a rollback changed it."""

    def end(self, end: RunEnd) -> None:
        """Receives the end of the training as the last call, unless the driver was killed."""


class Tracker:
    """The settings of a listener. One tracker serves many trainings, also at the same time.

    A tracker of this package is a frozen dataclass, saved with its stage as `{"name": ..., **options}`.
    """

    name: ClassVar[str] = ""

    def start(self, run: RunStart) -> Listener:
        raise NotImplementedError

    def check(self) -> None:
        """Raises ValueError, with the remedy, if this tracker cannot work here. Runs before the training."""

    def surroundings(self) -> dict[str, str]:
        """Returns facts about the calling thread that `start` needs, such as the active run.

        It must be quick and must not call a server. A CrossValidator copies stages in its caller's thread and
        fits them in a thread pool, so this method runs in both threads.
        """
        return {}

    def as_setting(self) -> dict[str, Any] | None:
        """Returns the name and non-default options; None if the tracker has no name or is no dataclass."""
        # A user's class may have a name without being a dataclass.
        if not self.name or not is_dataclass(self):
            return None
        options = {f.name: getattr(self, f.name) for f in fields(self)}
        defaults = {f.name: f.default for f in fields(self)}
        return {"name": self.name} | {k: v for k, v in options.items() if v != defaults[k]}


def check_options(tracker: Any, package: str = "") -> None:
    """Raises ValueError if an option of a tracker of this package is wrong, or if `package` is missing."""
    if package and find_spec(package) is None:
        raise ValueError(
            f"tracking {tracker.name!r} needs the package {package}, which is not installed; "
            f"pip install 'ringspark[{package}]', or take it out of tracking"
        )
    hints = hints_of(tracker.__class__)
    for each in fields(tracker):
        check(hints[each.name], getattr(tracker, each.name), f"tracking: {each.name} of {tracker.name!r}")
