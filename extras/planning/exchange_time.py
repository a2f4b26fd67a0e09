"""How long ranks need to sum a buffer: closed forms over a link's latency and its seconds per byte.

Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in MPICH". The cost
of adding the numbers is part of the seconds per byte, since that is how the link is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Link:
    """What a message between two ranks costs.

    Attributes:
        alpha: Seconds per message, however short.
        beta: Seconds per byte.
    """

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} of a link must be a number of seconds from 0, got {value!r}")

    @classmethod
    def of_network(cls, *, gigabits_per_second: float, milliseconds: float) -> Link:
        """Returns the link of a network by the figures of its maker.

        Raises:
            ValueError: A figure is not above 0, or the time below 0.
        """
        if not gigabits_per_second > 0:
            raise ValueError(f"gigabits_per_second must be above 0, got {gigabits_per_second!r}")
        return cls(alpha=milliseconds / 1000, beta=8e-9 / gigabits_per_second)


def ring_seconds(num_ranks: int, num_bytes: float, link: Link) -> float:
    """Returns the time of a ring all-reduce: 2(n-1) messages, each of a rank's n-th of the bytes."""
    return 2 * (num_ranks - 1) * (link.alpha + num_bytes / num_ranks * link.beta)


def hierarchical_seconds(
    num_ranks: int,
    ranks_per_host: int,
    num_bytes: float,
    inside: Link,
    between: Link,
    compression: float = 1.0,
) -> float:
    """Returns the time of a sum in two levels: parts inside each host, one ring a part between the hosts.

    The ranks of a host reduce-scatter, each sums its part with its peers on the other hosts, and all gather.
    The rings of a host share its link to the others. Hosts are full but the last.

    Args:
        compression: How many times smaller the bytes between hosts are.
    """
    local = min(num_ranks, ranks_per_host)
    hosts = -(-num_ranks // ranks_per_host)
    within = ring_seconds(local, num_bytes, inside)
    # Each of the host's ranks sends its part, so together they send all.
    return within + (ring_seconds(hosts, num_bytes / compression, between) if hosts > 1 else 0.0)


def solve_link(num_ranks: int, small: tuple[float, float], large: tuple[float, float]) -> Link:
    """Returns the link whose ring takes the measured times.

    Args:
        small: Bytes of a sum and its seconds.
        large: The same for a larger one.
    """
    (few, quick), (many, slow) = small, large
    steps = 2 * (num_ranks - 1)
    beta = max(0.0, (slow - quick) / (many - few) * num_ranks / steps)
    return Link(alpha=max(0.0, quick / steps - few / num_ranks * beta), beta=beta)


Exchange = Callable[[int], float]
"""From a number of ranks to seconds per step."""
