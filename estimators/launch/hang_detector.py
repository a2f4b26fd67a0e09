"""Finds the rank of a gang that hangs, from the ranks' signs of life and the driver's clock alone.

A rank is silent if its beats stand still (its process is stopped, its host lost), and stalled if its beats
go on but its ticks stand still (a loader never gives the next batch, user code never returns). A rank that
waits for a silent one stalls as well, so a silent rank is blamed first. Before a stalled rank is blamed,
the ranks that only wait for it get the time to end by their own timeout. Once a rank has failed, the others
have only the time of a few beats: with Gloo they learn of it and end, but with NCCL they may wait for a
device that never answers, and beat on. While a rank has yet to start, importing its libraries on a busy
machine, nobody makes progress and nobody hangs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from ringspark.estimators.collectives.rendezvous.client import START_SECONDS
from ringspark.estimators.launch.heartbeat import Beat, interval_seconds


@dataclass(kw_only=True)
class _Seen:
    """The last beat of a rank, and when the driver saw its counts change."""

    beat: Beat
    beat_changed: float
    tick_changed: float


@dataclass(frozen=True, kw_only=True)
class Hung:
    """The rank that keeps the others waiting.

    Attributes:
        beat: The rank's last sign of life; None if it never gave one.
    """

    rank: int
    beat: Beat | None
    reason: str


class HangDetector:
    """Judges the beats that the driver sees in one launch of a gang. Times are monotonic seconds."""

    def __init__(self, num_ranks: int, timeout_seconds: float) -> None:
        self._num_ranks = num_ranks
        self._timeout = timeout_seconds
        # Two beats may be missed, since the store may hiccup or the machine may be busy.
        self._grace = 2 * interval_seconds(timeout_seconds) + 1.0
        self._began: float | None = None
        self._seen: dict[int, _Seen] = {}
        self._stalled_since: float | None = None
        # When the first failure of a rank was seen.
        self._gave_up: float | None = None
        self._last_look: float | None = None
        # Seconds between the last looks.
        self._gaps: deque[float] = deque(maxlen=5)

    @property
    def beats(self) -> list[Beat]:
        """The last beats, in rank order."""
        return [self._seen[rank].beat for rank in sorted(self._seen)]

    def look(self, beats: Iterable[Beat], now: float) -> None:
        """Takes in the beats that the ranks have written last."""
        if self._last_look is not None:
            gap = now - self._last_look
            # Far longer than usual: the driver itself was stopped or could not read, so nothing is known
            # about the time between. With a store that always takes long, the time counts.
            if gap > max(self._grace, 2 * min(self._gaps, default=0.0)):
                self._forgive(gap)
            self._gaps.append(gap)
        self._last_look = now
        for beat in beats:
            if self._began is None:
                self._began = now
            if beat.failure is not None and self._gave_up is None:
                self._gave_up = now
            seen = self._seen.get(beat.rank)
            if seen is None:
                self._seen[beat.rank] = _Seen(beat=beat, beat_changed=now, tick_changed=now)
                continue
            if (beat.beats, beat.pid) != (seen.beat.beats, seen.beat.pid):
                seen.beat_changed = now
            if beat.ticks != seen.beat.ticks or beat.ended:
                seen.tick_changed = now
            seen.beat = beat
        if len(self._seen) < self._num_ranks:
            for seen in self._seen.values():
                seen.tick_changed = now

    def hung(self, now: float) -> Hung | None:
        """Returns the rank that hangs; None if none does."""
        if self._began is None:
            return None
        running = {rank: seen for rank, seen in self._seen.items() if not seen.beat.ended}
        # After a failure the gang is lost: a rank that is silent or stalled now has nothing to wait for.
        patience = self._timeout if self._gave_up is None else min(self._grace, self._timeout)
        late = [rank for rank in range(self._num_ranks) if rank not in self._seen]
        if late and now - self._began >= max(self._timeout, START_SECONDS):
            return Hung(rank=late[0], beat=None, reason="has not started")
        silent = [seen for seen in running.values() if now - seen.beat_changed >= patience]
        if silent:
            seen = min(silent, key=lambda s: (s.beat_changed, s.beat.rank))
            quiet = now - seen.beat_changed
            return Hung(
                rank=seen.beat.rank,
                beat=seen.beat,
                reason=f"has given no sign of life for {quiet:.0f} s",
            )
        # A rank that computes, and so has long not ticked, gets this time to see the failure by itself.
        since = self._gave_up or 0.0
        stalled = [seen for seen in running.values() if now - max(seen.tick_changed, since) >= patience]
        if not stalled:
            self._stalled_since = None
            return None
        if self._stalled_since is None:
            self._stalled_since = now
        if self._gave_up is None and now - self._stalled_since < self._grace:
            return None
        # The waiting ranks are all at the same step; the rank that they wait for has done the least.
        seen = min(stalled, key=lambda s: (s.beat.ticks, s.beat.rank))
        return Hung(
            rank=seen.beat.rank,
            beat=seen.beat,
            reason=f"has made no progress for {now - seen.tick_changed:.0f} s"
            + ("" if self._gave_up is None else " and another has failed"),
        )

    def excuse(self, now: float) -> None:
        """Restarts all clocks, because the ranks could not give signs of life."""
        if self._began is not None:
            self._began = now
        self._stalled_since = None
        for seen in self._seen.values():
            seen.beat_changed = seen.tick_changed = now

    def nobody_works(self, now: float) -> bool:
        """Whether every rank is done or has given no sign of life lately."""
        return not any(
            not seen.beat.ended and now - seen.beat_changed < self._grace for seen in self._seen.values()
        )

    def _forgive(self, seconds: float) -> None:
        if self._began is not None:
            self._began += seconds
        self._stalled_since = None
        for seen in self._seen.values():
            seen.beat_changed += seconds
            seen.tick_changed += seconds
