"""A training over several hosts that is disturbed at a step, and what became of it."""

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

# The training lasts longer than what happens to it: 60 steps of a tenth of a second and more.
SETTINGS: dict[str, Any] = {"checkpointEverySteps": 10, "timeoutSeconds": 20.0}
DATA = {"rows": 1280, "pause": 0.1}
AT_STEP = 15


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the driver told, and how long after the disturbance rank 0 made no step."""

    told: dict[str, Any]
    pause_seconds: float


def train(cluster: SparkHosts, disturb: Callable[[Host], None], *, rank: int = 1, **settings: Any) -> Outcome:
    """Trains, and calls `disturb` with the host of that rank when it has made some steps."""
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
    """Returns what takes a host's cable out for so long."""

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
