"""A rank's place in the gang, and how many bytes it sends from there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Member:
    """One rank's place in the gang; ranks on the same host have consecutive numbers."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    host: str = "127.0.0.1"


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

    def __init__(self, member: Member) -> None:
        self._member = member
        self.bytes_sent = 0

    def all_reduce(self, num_bytes: int) -> None:
        size = self._member.size
        self.bytes_sent += 2 * (size - 1) * num_bytes // size

    def all_gather(self, pieces: list[int]) -> None:
        """Counts an all-gather; `pieces` holds the bytes of each rank's piece."""
        # A rank sends all pieces but its successor's, which arrives here after the whole way around the ring.
        self.bytes_sent += sum(pieces) - pieces[(self._member.rank + 1) % self._member.size]

    def gather(self, num_bytes: int) -> None:
        """Counts a gather on rank 0; `num_bytes` are those of this rank's own piece."""
        if self._member.rank:
            self.bytes_sent += num_bytes

    def reduce_scatter(self, parts: list[int]) -> None:
        """Counts a reduce-scatter; `parts` holds the bytes of each rank's part."""
        self.bytes_sent += sum(parts) - parts[self._member.rank]

    def all_to_all(self, pieces: list[int]) -> None:
        """Counts an exchange of pieces; `pieces` holds the bytes of this rank's piece for each rank."""
        self.bytes_sent += sum(pieces) - pieces[self._member.rank]

    def broadcast(self, num_bytes: int, root: int) -> None:
        if (self._member.rank + 1) % self._member.size != root:
            self.bytes_sent += num_bytes
