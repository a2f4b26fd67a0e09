"""A training over several hosts with a disturbance at a step, and its outcome."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from namespaces import Host
from spark_hosts import SparkHosts
from waiting import wait_for

# 60 steps of 0.1 s or more, so that the training lasts longer than the disturbance.
SETTINGS: dict[str, Any] = {"checkpointEverySteps": 10, "timeoutSeconds": 20.0}
DATA = {"rows": 1280, "pause": 0.1}
AT_STEP = 15


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The driver's report, and rank 0's longest time without a step after the disturbance."""

    told: dict[str, Any]
    pause_seconds: float


def train(cluster: SparkHosts, disturb: Callable[[Host], None], *, rank: int = 1, **settings: Any) -> Outcome:
    """Trains, and calls `disturb` with the rank's host after some steps."""
    diary = cluster.folder / f"steps-{uuid.uuid4().hex[:8]}"
    driver = cluster.drive(SETTINGS | settings, **DATA, steps=str(diary))
    wait_for("the first steps", lambda: driver.poll() is not None or _last(diary, rank) >= AT_STEP)
    begun = time.monotonic()
    names = {name for _, which, _, name in _lines(diary) if which == str(rank)}
    if driver.poll() is None:
        disturb(next(host for host in cluster.workers if host.name in names))
    (told,) = cluster.results(driver)
    times = [float(at) for at, which, *_ in _lines(diary) if which == "0"]
    times = [begun, *(at for at in times if at > begun)]
    pause = max((later - earlier for earlier, later in pairwise(times)), default=0.0)
    return Outcome(told=told, pause_seconds=pause)


def drop(cluster: SparkHosts, seconds: float) -> Callable[[Host], None]:
    """Returns a disturbance that unplugs a host's cable for some seconds."""

    def disturb(host: Host) -> None:
        cluster.network.unplug(host)
        time.sleep(seconds)
        cluster.network.plug_in(host)

    return disturb


def _lines(diary: Path) -> list[list[str]]:
    lines = diary.read_text().splitlines() if diary.exists() else []
    return [words for words in map(str.split, lines) if len(words) == 4]


def _last(diary: Path, rank: int) -> int:
    return max((int(step) for _, which, step, _ in _lines(diary) if int(which) == rank), default=0)
