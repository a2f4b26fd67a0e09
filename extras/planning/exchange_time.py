"""Predicts the time of an all-reduce from a link's time per message and per byte.

The time per byte includes the addition of received numbers. Source: Thakur, Rabenseifner and Gropp 2005,
"Optimization of Collective Communication Operations in MPICH".
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Link:
    """Cost of a message between two ranks: `alpha` seconds per message and `beta` seconds per byte."""

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} of a link must be finite and at least 0 seconds, got {value!r}")

    @classmethod
    def of_network(cls, *, gigabits_per_second: float, milliseconds: float) -> Link:
        """Returns the link of a network with this bandwidth and latency.

        Raises:
            ValueError: The bandwidth is not above 0, or the latency is below 0.
        """
        if not gigabits_per_second > 0:
            raise ValueError(f"gigabits_per_second must be above 0, got {gigabits_per_second!r}")
        return cls(alpha=milliseconds / 1000, beta=8e-9 / gigabits_per_second)

    def describe(self) -> str:
        """Returns the cost of a message in words."""
        rate = f"plus its bytes at {1e-6 / self.beta:,.0f} MB/s" if self.beta else "at any size"
        return f"a message takes {show_seconds(self.alpha)} {rate}"

    def times(self, factor: float) -> Link:
        """Returns a link on which every message takes `factor` times as long."""
        return Link(alpha=self.alpha * factor, beta=self.beta * factor)


def ring_seconds(num_ranks: int, num_bytes: float, link: Link) -> float:
    """Returns the time of a ring all-reduce over n ranks: 2(n-1) messages with 1/n of the bytes each."""
    return 2 * (num_ranks - 1) * (link.alpha + num_bytes / num_ranks * link.beta)


def hierarchical_seconds(
    num_ranks: int,
    ranks_per_host: int,
    num_bytes: float,
    inside: Link,
    between: Link,
    compression: float = 1.0,
) -> float:
    """Returns the time of a hierarchical all-reduce; messages between hosts are compressed by `compression`.

    The ranks of each host reduce-scatter. Then the ranks with the same shard, one per host, all-reduce the
    shard, and the ranks of each host all-gather. All hosts except perhaps the last have `ranks_per_host`
    ranks.
    """
    local = min(num_ranks, ranks_per_host)
    hosts = -(-num_ranks // ranks_per_host)
    within = ring_seconds(local, num_bytes, inside)
    # The ranks of a host together send the whole buffer over the host's link.
    return within + (ring_seconds(hosts, num_bytes / compression, between) if hosts > 1 else 0.0)


def solve_message(small: tuple[float, float], large: tuple[float, float]) -> Link:
    """Returns the link that explains two measured messages, each given as (bytes, seconds)."""
    (few, quick), (many, slow) = small, large
    beta = max(0.0, (slow - quick) / (many - few))
    return Link(alpha=max(0.0, quick - few * beta), beta=beta)


def solve_link(num_ranks: int, small: tuple[float, float], large: tuple[float, float]) -> Link:
    """Returns the link that explains two measured all-reduces, each given as (bytes, seconds)."""
    steps = 2 * (num_ranks - 1)
    one, other = ((num_bytes / num_ranks, seconds / steps) for num_bytes, seconds in (small, large))
    return solve_message(one, other)


def show_seconds(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns" if seconds else "0"
