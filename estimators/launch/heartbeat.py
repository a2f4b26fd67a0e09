"""Heartbeats that every rank of a gang writes into the run directory while it works.

The heartbeat thread also ends obsolete work: a worker exits if its parent process died, and a rank stops if
the run directory was removed. Rank 0, which writes the other files there, stops if a later launch or another
driver took over the run.
"""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from ringspark.estimators import run_layout
from ringspark.estimators.failures import Failure
from ringspark.estimators.launch.owner import read_owner
from ringspark.estimators.training.phase import Status
from ringspark.pipelines import storage
from ringspark.pipelines.typed_json import parse_object, record

LONGEST_INTERVAL_SECONDS = 5.0
# Short, to leave quickly when the parent dies or the work is done.
_TICK_SECONDS = 0.25


def interval_seconds(timeout_seconds: float) -> float:
    return min(LONGEST_INTERVAL_SECONDS, timeout_seconds / 4)


@dataclass(frozen=True, kw_only=True)
class Beat:
    """One heartbeat of a rank, in `run/heartbeat/rank-<k>.json`.

    `ticks` counts the rank's signs of progress. `token` names the driver that owns the run. `launch` is the
    number of earlier launches by this driver.
    """

    token: str
    rank: int
    host: str
    task: int
    pid: int
    launch: int
    phase: str
    ticks: int
    beats: int
    ended: bool = False
    failure: str | None = None

    @classmethod
    def from_json(cls, data: bytes) -> Beat | None:
        try:
            # Checked here, because anybody who may write into the folder may write nonsense.
            beat = record(cls, parse_object(data))
            if beat.failure is not None:
                Failure.from_json(beat.failure)
            return beat
        except ValueError:
            return None


def beat_uri(run_uri: str, rank: int) -> str:
    return storage.join(run_uri, run_layout.HEARTBEAT, f"rank-{rank}.json")


def read_beats(
    run_uri: str, num_ranks: int, token: str, launch: int, readers: Executor | None = None
) -> list[Beat]:
    """Returns the last beat of each rank that has written one in this launch. Runs on the driver."""

    def read(rank: int) -> Beat | None:
        try:
            beat = Beat.from_json(storage.read_bytes(beat_uri(run_uri, rank)))
        except FileNotFoundError:
            return None
        is_current = beat is not None and (beat.token, beat.launch, beat.rank) == (token, launch, rank)
        return beat if is_current else None

    each = map if readers is None else readers.map
    return [beat for beat in each(read, range(num_ranks)) if beat is not None]


@dataclass(frozen=True, kw_only=True)
class Pulse:
    """Heartbeat settings of one launch, which Spark ships to the ranks."""

    run_uri: str
    token: str
    launch: int = 0
    timeout_seconds: float = 600.0


class Heartbeat:
    """A context manager that writes beats until the rank's work in its block ends. Runs on every rank."""

    def __init__(self, pulse: Pulse, status: Status, rank: int, host: str, task: int) -> None:
        self._pulse = pulse
        self._status = status
        self._parent = os.getppid()
        self._done = threading.Event()
        self._failure: Failure | None = None
        self._thread = threading.Thread(target=self._run, name="ringspark-heartbeat", daemon=True)
        self._beat = Beat(
            token=pulse.token,
            rank=rank,
            host=host,
            task=task,
            pid=os.getpid(),
            launch=pulse.launch,
            phase="",
            ticks=0,
            beats=0,
        )

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def fail(self, failure: Failure) -> Failure:
        """Puts the first failure into the next beats, because the rank's row may never reach the driver."""
        self._failure = self._failure or failure
        return self._failure

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        # A store that does not answer must not delay the result.
        self._thread.join(LONGEST_INTERVAL_SECONDS)

    def _run(self) -> None:
        interval = interval_seconds(self._pulse.timeout_seconds)
        # Before the first beat, because this rank may belong to an earlier launch.
        self._stop_if_replaced()
        left = 0.0
        while True:
            if left <= 0:
                self._write(ended=False)
                self._stop_if_replaced()
                left = interval
            if self._done.wait(min(_TICK_SECONDS, left)):
                self._write(ended=True)
                return
            left -= _TICK_SECONDS
            if os.getppid() != self._parent:
                # Nobody is left to take the result or to end this process.
                os._exit(1)

    def _write(self, *, ended: bool) -> None:
        self._beat = replace(
            self._beat,
            phase=self._failure.phase if self._failure else self._status.phase,
            ticks=self._status.ticks,
            beats=self._beat.beats + 1,
            ended=ended,
            failure=self._failure.to_json() if self._failure else None,
        )
        # The store's client may raise anything.
        with suppress(Exception):
            data = json.dumps(asdict(self._beat)).encode()
            try:
                # The next beat replaces it, so a flush to disk would only disturb the training.
                storage.write_atomic(beat_uri(self._pulse.run_uri, self._beat.rank), data, durable=False)
            except storage.UnclaimedError:
                self._status.stop(
                    f"the run's folder {self._pulse.run_uri!r} was removed, so its training cannot continue"
                )

    def _stop_if_replaced(self) -> None:
        if self._beat.rank != 0:  # only rank 0 writes into the run directory
            return
        with suppress(Exception):
            owner = read_owner(self._pulse.run_uri)
            if owner is None:
                return
            if owner.token != self._pulse.token:
                self._status.stop(
                    f"another driver has taken over the run in {self._pulse.run_uri!r}; "
                    "let only one driver work on a run"
                )
            elif owner.launch > self._pulse.launch:
                self._status.stop("the driver has restarted the workers without this worker")
            self._status.must_regroup = owner.regroups
