"""Reads the folder of a run that is training, has failed or has finished."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ringspark.estimators import run_layout
from ringspark.estimators.failures import Failure
from ringspark.estimators.launch.heartbeat import Beat
from ringspark.estimators.stages.summary import TrainingSummary
from ringspark.estimators.techniques import FUNCTIONS
from ringspark.estimators.training.history import EpochRecord, TrainingProgress, read_history, read_progress
from ringspark.estimators.training.run_environment import DataFacts, Environment
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.estimators.training.step_log import StepRecord, read_steps
from ringspark.estimators.training.worker import FinishedRun
from ringspark.extras.report.held_out.findings import HeldOut
from ringspark.pipelines import ShardManifest, storage

T = TypeVar("T")

# File -> description of its content.
_EXPECTED = {
    run_layout.CONFIG: "settings",
    run_layout.ENVIRONMENT: "hosts, versions and memory",
    run_layout.DATA: "statistics of the data",
}


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The content of a run's folder; a missing or damaged file leaves its attribute empty.

    Attributes:
        time_shares: Rank -> type of work -> share of its time, from 0 to 1.
        problems: One sentence per file that could not be read.
        missing: Name of each missing file -> description of its content.
        held_out: The model's results on held-out rows; None if no rows were given.
    """

    run_uri: str
    outcome: TrainingSummary | None = None
    config: TrainConfig | None = None
    history: tuple[EpochRecord, ...] = ()
    steps: tuple[StepRecord, ...] = ()
    progress: TrainingProgress | None = None
    environment: Environment = field(default_factory=Environment)
    data: DataFacts | None = None
    heartbeats: tuple[Beat, ...] = ()
    time_shares: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    held_out: HeldOut | None = None

    @property
    def rows_per_second(self) -> float:
        """Mean rate of the epochs, with validation but without startup; NaN before the first rows."""
        rows, seconds = sum(r.rows for r in self.history), sum(r.seconds for r in self.history)
        if not rows:
            rows, _, seconds = self.so_far
        return rows / seconds if rows and seconds else math.nan

    @property
    def so_far(self) -> tuple[int, int, float]:
        """Rows, steps and seconds of the training so far, from the file with the most steps."""
        if self.outcome is not None:
            return self.outcome.rows, self.outcome.steps, self.outcome.seconds
        steps, seconds = sum(r.steps for r in self.history), sum(r.seconds for r in self.history)
        known = [
            (steps, sum(r.rows for r in self.history), seconds),
            *((r.step, r.rows, r.seconds) for r in self.steps[-1:]),
            *((p.step, p.rows, p.seconds) for p in [self.progress] if p is not None),
        ]
        steps, rows, seconds = max(known)
        return rows, steps, seconds


def read_run(run_uri: str) -> RunFacts:
    """Reads the folder of a run, also while it trains; raises ValueError if it holds no run."""
    uri = storage.normalize(run_uri)
    names = set(storage.list_names(uri))
    marks = {run_layout.OWNER, run_layout.CONFIG, run_layout.HISTORY, run_layout.RESULT, run_layout.PROGRESS}
    if not names & marks:
        raise ValueError(
            f"{uri!r} holds no run; give the runUri of a training, or the run_uri of its summary"
        )
    problems: list[str] = []

    def try_read(name: str, read: Callable[[], T], otherwise: T) -> T:
        try:
            return read()
        except FileNotFoundError:
            return otherwise
        except (ValueError, OSError) as error:
            problems.append(f"{name} could not be read: {error}")
            return otherwise

    def parse_file(name: str, parse: Callable[[bytes], T]) -> T | None:
        return try_read(name, lambda: parse(storage.read_bytes(storage.join(uri, name))), None)

    finished = parse_file(run_layout.RESULT, lambda text: FinishedRun.from_json(text))
    config = parse_file(run_layout.CONFIG, lambda text: TrainConfig.from_json(text.decode()))
    no_history: tuple[EpochRecord, ...] = ()
    history = try_read(run_layout.HISTORY, lambda: tuple(read_history(uri)), no_history)
    return RunFacts(
        run_uri=uri,
        outcome=None if finished is None else TrainingSummary.of(finished),
        config=config,
        history=history if finished is None else finished.result.history,
        steps=try_read(run_layout.STEPS, lambda: tuple(read_steps(uri)), ()),
        progress=try_read(run_layout.PROGRESS, lambda: read_progress(uri), None),
        environment=parse_file(run_layout.ENVIRONMENT, Environment.from_json) or Environment(),
        data=try_read(run_layout.DATA, lambda: _read_data(uri, config), None),
        heartbeats=try_read(run_layout.HEARTBEAT, lambda: _read_heartbeats(uri), ()),
        time_shares=try_read(run_layout.TIMELINE, lambda: _read_time_shares(uri), {}),
        problems=tuple(problems),
        missing={name: content for name, content in _EXPECTED.items() if name not in names},
    )


def run_of_summary(summary: TrainingSummary) -> RunFacts:
    """Returns the run of a `TrainingSummary`, with the files that its run folder still has."""
    try:
        found = read_run(summary.run_uri)
    except (ValueError, OSError) as error:
        found = RunFacts(run_uri=summary.run_uri, problems=(f"the run's folder is not readable: {error}",))
    return replace(found, outcome=summary, history=summary.epochs)


def _read_data(uri: str, config: TrainConfig | None) -> DataFacts | None:
    try:
        return DataFacts.from_json(storage.read_bytes(storage.join(uri, run_layout.DATA)))
    except FileNotFoundError:
        # The ranks have not begun.
        if config is None or not storage.exists(storage.join(config.shards_uri, "manifest.json")):
            return None
        return DataFacts.of(ShardManifest.load(config.shards_uri))


def failure_of(beat: Beat) -> str:
    """Returns the error that ended a rank, as "type: message"; "" if it has not failed."""
    failure = None if beat.failure is None else Failure.from_json(beat.failure)
    return "" if failure is None else f"{failure.type}: {failure.message}"


def _read_heartbeats(uri: str) -> tuple[Beat, ...]:
    folder = storage.join(uri, run_layout.HEARTBEAT)
    found = []
    for name in storage.list_names(folder):
        if name.endswith(".json"):
            with suppress(FileNotFoundError):
                found.append(Beat.from_json(storage.read_bytes(storage.join(folder, name))))
    return tuple(sorted(filter(None, found), key=lambda beat: beat.rank))


def _read_time_shares(uri: str) -> dict[int, dict[str, float]]:
    if not storage.list_names(storage.join(uri, run_layout.TIMELINE)):
        return {}
    return FUNCTIONS["time_shares"](uri)  # type: ignore[no-any-return]
