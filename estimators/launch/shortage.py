"""Decides how long ordinary tasks wait for executors, and how the gang continues if too few come."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import SparkSession

from ringspark.estimators.collectives.rendezvous.client import START_SECONDS
from ringspark.estimators.failures import Failure
from ringspark.estimators.launch.roster import RosterBuilder
from ringspark.estimators.training.settings.values import C, GangConfig
from ringspark.pipelines.spark_paths import is_remote

# A gang that lost workers continues with fewer workers after this time without a new worker, in seconds: if
# all survivors are back, and otherwise. Growing again costs about a second.
_SURVIVED_SECONDS, _FEWER_SECONDS = 1.0, 5.0
# Time without a new worker, in seconds, after which a warning says what the gang waits for.
_SAY_SECONDS = 5.0

_logger = logging.getLogger(__name__)


@dataclass
class Shortage:
    """Decides how long the tasks of a gang wait for each other.

    `least` is the smallest number of workers after a loss. `survivors` is the number of workers that the last
    launch did not lose; 0 if it ended for another reason.

    Two gangs that each hold some of the slots would wait for each other forever. So a gang that gets no more
    executors ends its tasks, and starts them again after a random pause. Other work can use the executors in
    this pause.
    """

    spark: SparkSession
    conf: Mapping[str, str]
    least: int
    survivors: int = 0
    _since: float | None = None
    _said: bool = False
    _patience: float = field(init=False)

    def __post_init__(self) -> None:
        self._idle = seconds_of(self.conf.get("spark.dynamicAllocation.executorIdleTimeout", "60s"))
        self._draw()

    def _draw(self) -> None:
        self._patience = (2 * self._idle + 10.0) * random.uniform(1.0, 2.0)

    def find(self, builder: RosterBuilder, config: GangConfig, launch: int) -> str | None:
        """Returns why the tasks must stop waiting; None while they may wait."""
        if builder.roster is not None:
            self._since, self._said, self.survivors = None, False, 0
            self._draw()
            return None
        now = time.monotonic()
        self._since = self._since or now
        found, wanted = len(builder.offers), config.num_workers
        idle = now - builder.changed_at
        if idle >= _SAY_SECONDS and not self._said:
            self._said = True
            _logger.warning(
                "found %d of %d workers; waiting up to %g s for executors",
                found,
                wanted,
                config.timeout_seconds,
            )
        can_shrink = launch > 0 and self._fitting(config, found) is not None
        fewer = _SURVIVED_SECONDS if 0 < self.survivors <= found else _FEWER_SECONDS
        # After a pause too, each task has time to start and to import its libraries.
        is_over = now - self._since >= config.timeout_seconds and idle >= START_SECONDS
        if is_over or idle >= (fewer if can_shrink else self._patience):
            return f"Spark has started {found} of {wanted} workers"
        return None

    def solve(self, cause: Failure, config: C, found: int, launch: int) -> C:
        """Returns the config of the next launch: with fewer workers, or the same after a random pause.

        Raises RuntimeError if the cluster has not given the workers within `timeout_seconds`.
        """
        fitting = self._fitting(config, found) if launch > 0 else None
        if fitting is not None:
            _logger.warning(
                "the training continues with %d workers instead of %d", fitting, config.num_workers
            )
            return config.with_workers(fitting)
        waited = time.monotonic() - (self._since or time.monotonic())
        if waited >= config.timeout_seconds:
            raise RuntimeError(
                f"the cluster has started {found} of the {config.num_workers} workers within "
                f"{config.timeout_seconds:g} s{_holders(self.spark)}; lower numWorkers, free or add "
                "executors, or raise timeoutSeconds"
            )
        pause = min((self._idle + 5.0) * random.uniform(1.0, 3.0), config.timeout_seconds - waited)
        _logger.warning(
            "%s; the training gives its slots back for %.0f s, because other work may wait for them",
            cause.message,
            pause,
        )
        time.sleep(pause)
        self._patience *= 2  # else a gang with slow executors would never start
        return config

    def _fitting(self, config: GangConfig, found: int) -> int | None:
        fitting = found - found % config.workers_per_replica
        return fitting if fitting >= min(self.least, config.num_workers) else None


def seconds_of(text: str) -> float:
    """Reads a time of Spark's conf, such as "60s" or "2min"; a number alone is in seconds."""
    units = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = text.strip()[len(number) :]
    return float(number) * units.get(unit, 1.0)


def _holders(spark: SparkSession) -> str:
    """Says which other stages of this application hold slots, where Spark tells."""
    if is_remote(spark):
        return ""
    tracker: Any = spark.sparkContext.statusTracker()
    stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
    held = [f"{s.numActiveTasks} by stage {s.stageId} ({s.name})" for s in stages if s and s.numActiveTasks]
    return f" (slots in use: {', '.join(held)})" if held else ""
