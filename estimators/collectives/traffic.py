"""A rank's place in the gang, and how many bytes it sends from there."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Member:
    """One rank's place in the gang; ranks on the same host have consecutive numbers.

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

    def host_of(self, rank: int) -> int:
        """Returns the index of a rank's host."""
        return bisect_right(self.leaders, rank) - 1

    def within(self, ranks: Sequence[int]) -> Member:
        """Returns this rank's place among some of the ranks, ascending, of which it is one."""
        hosts = [self.host_of(rank) for rank in ranks]
        index = ranks.index(self.rank)
        own = [rank for rank, host in zip(ranks, hosts, strict=True) if host == hosts[index]]
        leaders = tuple(i for i, host in enumerate(hosts) if i == 0 or hosts[i - 1] != host)
        local_rank = own.index(self.rank)
        # Those with this local rank, on all hosts that have one.
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
    """Counts the bytes that a rank sends, as the ring algorithms send them.

    The count is the algorithm's, not the network card's: it leaves headers, rendezvous and barriers
    out. A library that picks a tree for small tensors sends as much, summed over the ranks. In a ring of
    N ranks, one rank sends

    - all_reduce of n bytes: 2 (N - 1) / N * n (Patarasuk and Yuan 2009), for the gradients of a step
      as for any tensor;
    - all_gather: its own piece and those it passes on, each of the N - 1 times a piece moves;
    - gather: its own piece, but nothing by rank 0, which gets them;
    - reduce_scatter: a partial sum of every part but its own;
    - all_to_all: its pieces for the others, straight to them;
    - broadcast of n bytes: n, but nothing by the last rank of the ring, the one before the root.
    """

    def __init__(self, member: Member, whole: Traffic | None = None) -> None:
        """Starts at 0.

        Args:
            whole: Counter of the gang of which this one's ranks are a part; it counts their bytes too.
        """
        self._member = member
        self._whole = whole
        self.bytes_sent = 0

    def _add(self, num_bytes: int) -> None:
        self.bytes_sent += num_bytes
        if self._whole is not None:
            self._whole._add(num_bytes)

    def all_reduce(self, num_bytes: int) -> None:
        size = self._member.size
        self._add(2 * (size - 1) * num_bytes // size)

    def all_gather(self, pieces: list[int]) -> None:
        """Counts an all-gather; `pieces` holds the bytes of each rank's piece."""
        # A rank sends all pieces but its successor's, which arrives here after the whole way around the ring.
        self._add(sum(pieces) - pieces[(self._member.rank + 1) % self._member.size])

    def gather(self, num_bytes: int) -> None:
        """Counts a gather on rank 0; `num_bytes` are those of this rank's own piece."""
        if self._member.rank:
            self._add(num_bytes)

    def reduce_scatter(self, parts: list[int]) -> None:
        """Counts a reduce-scatter; `parts` holds the bytes of each rank's part."""
        self._add(sum(parts) - parts[self._member.rank])

    def all_to_all(self, pieces: list[int]) -> None:
        """Counts an exchange of pieces; `pieces` holds the bytes of this rank's piece for each rank."""
        self._add(sum(pieces) - pieces[self._member.rank])

    def send(self, num_bytes: int) -> None:
        """Counts what goes to one rank alone."""
        self._add(num_bytes)

    def broadcast(self, num_bytes: int, root: int) -> None:
        if (self._member.rank + 1) % self._member.size != root:
            self._add(num_bytes)
