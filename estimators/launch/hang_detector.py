"""Finds the rank that hangs a gang, from the ranks' heartbeats and the driver's clock alone.

A silent rank sends no heartbeats: its process or host is lost. A stalled rank sends heartbeats without
progress. Ranks that wait for a hanging rank stall too. So silent ranks are blamed before stalled ones, and
stalled ranks get time to end by their own timeout. No rank counts as stalled while another rank still imports
its libraries.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from ringspark.estimators.collectives.rendezvous.client import START_SECONDS
from ringspark.estimators.launch.heartbeat import Beat, interval_seconds


@dataclass(kw_only=True)
class _RankClock:
    beat: Beat
    beat_changed: float
    tick_changed: float


@dataclass(frozen=True, kw_only=True)
class Hung:
    """The rank that hangs; `beat` is its last beat, or None if it never sent one."""

    rank: int
    beat: Beat | None
    reason: str


class HangDetector:
    """Judges the beats of one launch of a gang. Times are monotonic seconds."""

    def __init__(self, num_ranks: int, timeout_seconds: float) -> None:
        self._num_ranks = num_ranks
        self._timeout = timeout_seconds
        # Two beats may be missed: the store may fail for a moment, or the machine may be busy.
        self._grace = 2 * interval_seconds(timeout_seconds) + 1.0
        self._began: float | None = None
        self._seen: dict[int, _RankClock] = {}
        self._stalled_since: float | None = None
        self._first_failure: float | None = None
        self._last_update: float | None = None
        # Seconds between the last updates.
        self._gaps: deque[float] = deque(maxlen=5)

    @property
    def beats(self) -> list[Beat]:
        return [self._seen[rank].beat for rank in sorted(self._seen)]

    def update(self, beats: Iterable[Beat], now: float) -> None:
        if self._last_update is not None:
            gap = now - self._last_update
            # After an unusual gap, the driver was stopped or could not read, which says nothing about the
            # ranks. If the store is always slow, the time counts.
            if gap > max(self._grace, 2 * min(self._gaps, default=0.0)):
                self._shift_clocks(gap)
            self._gaps.append(gap)
        self._last_update = now
        for beat in beats:
            if self._began is None:
                self._began = now
            if beat.failure is not None and self._first_failure is None:
                self._first_failure = now
            seen = self._seen.get(beat.rank)
            if seen is None:
                self._seen[beat.rank] = _RankClock(beat=beat, beat_changed=now, tick_changed=now)
                continue
            if (beat.beats, beat.pid) != (seen.beat.beats, seen.beat.pid):
                seen.beat_changed = now
            if beat.ticks != seen.beat.ticks or beat.ended:
                seen.tick_changed = now
            seen.beat = beat
        if len(self._seen) < self._num_ranks:
            for seen in self._seen.values():
                seen.tick_changed = now

    def find_hung(self, now: float) -> Hung | None:
        if self._began is None:
            return None
        running = {rank: seen for rank, seen in self._seen.items() if not seen.beat.ended}
        # After a failure the gang is lost, so nobody needs to wait for a silent or stalled rank.
        patience = self._timeout if self._first_failure is None else min(self._grace, self._timeout)
        late = [rank for rank in range(self._num_ranks) if rank not in self._seen]
        if late and now - self._began >= max(self._timeout, START_SECONDS):
            return Hung(rank=late[0], beat=None, reason="has not started")
        silent = [seen for seen in running.values() if now - seen.beat_changed >= patience]
        if silent:
            seen = min(silent, key=lambda s: (s.beat_changed, s.beat.rank))
            reason = f"has sent no heartbeat for {now - seen.beat_changed:.0f} s"
            return Hung(rank=seen.beat.rank, beat=seen.beat, reason=reason)
        # A rank in a long computation has not ticked for some time; it gets this time to notice the failure.
        since = self._first_failure or 0.0
        stalled = [seen for seen in running.values() if now - max(seen.tick_changed, since) >= patience]
        if not stalled:
            self._stalled_since = None
            return None
        if self._stalled_since is None:
            self._stalled_since = now
        if self._first_failure is None and now - self._stalled_since < self._grace:
            return None
        # The waiting ranks are all at the same step; the rank that they wait for has done the least.
        seen = min(stalled, key=lambda s: (s.beat.ticks, s.beat.rank))
        reason = f"has made no progress for {now - seen.tick_changed:.0f} s"
        if self._first_failure is not None:
            reason += ", and another worker has failed"
        return Hung(rank=seen.beat.rank, beat=seen.beat, reason=reason)

    def restart_clocks(self, now: float) -> None:
        """Gives all ranks their full timeout again, because no rank could write heartbeats."""
        if self._began is not None:
            self._began = now
        self._stalled_since = None
        for seen in self._seen.values():
            seen.beat_changed = seen.tick_changed = now

    def is_idle(self, now: float) -> bool:
        """Whether every rank has ended or has sent no heartbeat lately."""
        seen = self._seen.values()
        return all(each.beat.ended or now - each.beat_changed >= self._grace for each in seen)

    def is_silent(self, rank: int) -> bool:
        """Whether the rank had missed two heartbeats at the last update."""
        seen, now = self._seen[rank], self._last_update or 0.0
        return now - seen.beat_changed >= self._grace

    def _shift_clocks(self, seconds: float) -> None:
        if self._began is not None:
            self._began += seconds
        self._stalled_since = None
        for seen in self._seen.values():
            seen.beat_changed += seconds
            seen.tick_changed += seconds
