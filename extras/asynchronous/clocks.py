"""The workers' clocks: the number of steps that each has pushed; without threads.

Stale synchronous parallel: a reader at clock c with a bound s may read only if every worker has pushed at
least c - s steps. Clocks never decrease, so a worker that has read is at most s steps ahead.
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
        """Returns whether a reader at `clock` is at most `bound` steps ahead of the slowest worker."""
        return bound is None or self.slowest >= clock - bound

    def towards(self, clock: int) -> int:
        """Returns a number that grows with each step of a worker towards `clock`."""
        return sum(min(pushed, clock) for pushed in self.pushed)

    def behind(self, clock: int) -> list[int]:
        """Returns the ranks that have pushed fewer than `clock` steps."""
        return [rank for rank, pushed in enumerate(self.pushed) if pushed < clock]

    def of_others(self, worker: int) -> int:
        """Returns the total number of steps that other workers have pushed."""
        return sum(self.pushed) - self.pushed[worker]
