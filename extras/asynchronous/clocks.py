"""The workers' clocks: how many steps each has pushed; pure, without threads.

Invariant (the bound of stale synchronous parallel): a reader at clock c, under a bound s, is let through only
if every worker has pushed at least c - s steps. So it sees every update of clocks 0 to c - s - 1, and no
worker that was let through is ever more than s ahead of the slowest, because clocks never go back.
"""

from __future__ import annotations


class Clocks:
    """One clock per worker, from 0.

    Attributes:
        pushed: Steps that each worker has pushed, by rank.
    """

    def __init__(self, size: int) -> None:
        self.pushed = [0] * size

    @property
    def slowest(self) -> int:
        return min(self.pushed)

    def tick(self, worker: int) -> None:
        """Ends a worker's step."""
        self.pushed[worker] += 1

    def may_read(self, clock: int, bound: int | None) -> bool:
        """Returns whether a reader at `clock` may be at most `bound` ahead of what it reads."""
        return bound is None or self.slowest >= clock - bound

    def towards(self, clock: int) -> int:
        """Returns a number that grows with each step that somebody takes towards `clock`."""
        return sum(min(pushed, clock) for pushed in self.pushed)

    def behind(self, clock: int) -> list[int]:
        """Returns the ranks that have pushed fewer than `clock` steps."""
        return [rank for rank, pushed in enumerate(self.pushed) if pushed < clock]

    def of_others(self, worker: int) -> int:
        """Returns the steps that all others have pushed together."""
        return sum(self.pushed) - self.pushed[worker]
