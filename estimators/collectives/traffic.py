"""A rank's position in the gang, and a counter of the bytes that it sends."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Member:
    """One rank's position in the gang; ranks on the same host have consecutive numbers.

    Attributes:
        leaders: The first rank of each host, ascending.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    host: str = "127.0.0.1"
    leaders: tuple[int, ...] = (0,)

    @property
    def has_levels(self) -> bool:
        """Whether there are several hosts, and several ranks on one of them."""
        return 1 < len(self.leaders) < self.size

    @property
    def hosts(self) -> list[list[int]]:
        return [list(range(a, b)) for a, b in zip(self.leaders, [*self.leaders[1:], self.size], strict=True)]

    def host_of(self, rank: int) -> int:
        return bisect_right(self.leaders, rank) - 1

    def within(self, ranks: Sequence[int]) -> Member:
        """Returns this rank's position among `ranks`, which are ascending and include it."""
        hosts = [self.host_of(rank) for rank in ranks]
        index = ranks.index(self.rank)
        own = [rank for rank, host in zip(ranks, hosts, strict=True) if host == hosts[index]]
        leaders = tuple(i for i, host in enumerate(hosts) if i == 0 or hosts[i - 1] != host)
        local_rank = own.index(self.rank)
        # Hosts that have a rank with this local rank.
        cross = [h for h in sorted(set(hosts)) if hosts.count(h) > local_rank]
        return Member(
            rank=index,
            size=len(ranks),
            local_rank=local_rank,
            local_size=len(own),
            cross_rank=cross.index(hosts[index]),
            cross_size=len(cross),
            host=self.host,
            leaders=leaders,
        )


class Traffic:
    """Counts the bytes that a rank sends by ring algorithms, without headers, rendezvous and barriers.

    In a ring of N ranks, a rank sends

    - all_reduce of n bytes: 2 (N - 1) / N * n (Patarasuk and Yuan 2009);
    - all_gather: all tensors except the one of the next rank;
    - gather: its own tensor; rank 0 sends nothing;
    - reduce_scatter: partial sums of all shards except its own;
    - all_to_all: its tensors for other ranks;
    - broadcast of n bytes: n; the last rank of the ring, before the root, sends nothing.
    """

    def __init__(self, member: Member, whole: Traffic | None = None) -> None:
        """Starts at 0 bytes. `whole`, the counter of a larger group of ranks, also counts the same bytes."""
        self._member = member
        self._whole = whole
        self.bytes_sent = 0

    def send(self, num_bytes: int) -> None:
        self.bytes_sent += num_bytes
        if self._whole is not None:
            self._whole.send(num_bytes)

    def all_reduce(self, num_bytes: int) -> None:
        size = self._member.size
        self.send(2 * (size - 1) * num_bytes // size)

    def all_gather(self, pieces: list[int]) -> None:
        # The next rank's tensor arrives here last, after the whole ring.
        self.send(sum(pieces) - pieces[(self._member.rank + 1) % self._member.size])

    def gather(self, num_bytes: int, root: int) -> None:
        if self._member.rank != root:
            self.send(num_bytes)

    def reduce_scatter(self, parts: list[int]) -> None:
        self.send(sum(parts) - parts[self._member.rank])

    def all_to_all(self, pieces: list[int]) -> None:
        self.send(sum(pieces) - pieces[self._member.rank])

    def broadcast(self, num_bytes: int, root: int) -> None:
        if (self._member.rank + 1) % self._member.size != root:
            self.send(num_bytes)
