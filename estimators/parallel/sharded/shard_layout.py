"""Assigns the elements of a network's parameters to ranks, by the same arithmetic on every rank.

Buckets hold parameters in reverse order of registration, which is about the order of a backward pass. Each
rank holds one range of each bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Slot:
    """The range [start, stop) of parameter number `index` in its bucket."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class ParameterSlice:
    """Elements [start, stop) of parameter `index` that `rank` holds, at `offset` in the rank's range."""

    rank: int
    index: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Parameters of one dtype, end to end.

    Attributes:
        bounds: Rank r holds elements [bounds[r], bounds[r + 1]). Elements after the last slot are padding.
    """

    slots: tuple[Slot, ...]
    bounds: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return self.bounds[-1]

    @property
    def counts(self) -> list[int]:
        return [stop - start for start, stop in zip(self.bounds, self.bounds[1:], strict=False)]

    def slices(self) -> Iterator[ParameterSlice]:
        """Yields the slices of parameters that the ranks hold, without padding."""
        for rank, (low, high) in enumerate(zip(self.bounds, self.bounds[1:], strict=False)):
            for slot in self.slots:
                start, stop = max(slot.start, low), min(slot.stop, high)
                if start < stop:
                    yield ParameterSlice(
                        rank=rank,
                        index=slot.index,
                        start=start - slot.start,
                        stop=stop - slot.start,
                        offset=start - low,
                    )


def even_layout(members: Sequence[Sequence[int]], sizes: Sequence[int], num_ranks: int) -> list[Bucket]:
    """Makes buckets with an equal number of elements on every rank, which may split parameters.

    `members` are the indices of each bucket's parameters, from `fill_buckets`.
    """
    buckets = []
    for own in members:
        slots, end = _slots(own, sizes)
        share = -(-end // num_ranks)
        buckets.append(Bucket(slots=slots, bounds=tuple(share * rank for rank in range(num_ranks + 1))))
    return buckets


def whole_layout(members: Sequence[Sequence[int]], sizes: Sequence[int], num_ranks: int) -> list[Bucket]:
    """Like `even_layout`, but each parameter belongs to one rank.

    Assigns the largest parameter first, each to the rank with the fewest elements (Graham 1969: at most 4/3
    of the best balance).
    """
    loads, owners = [0] * num_ranks, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sizes[index]
    buckets = []
    for own in members:
        slots, _ = _slots(sorted(own, key=lambda i: owners[i]), sizes)
        counts = [sum(sizes[i] for i in own if owners[i] == rank) for rank in range(num_ranks)]
        bounds = tuple(sum(counts[:rank]) for rank in range(num_ranks + 1))
        buckets.append(Bucket(slots=slots, bounds=bounds))
    return buckets


def fill_buckets(
    sizes: Sequence[int], kinds: Sequence[object], max_elements: Sequence[int]
) -> list[list[int]]:
    """Assigns parameters to buckets, in order; returns the indices of each bucket's parameters.

    All parameters of a bucket are of one kind, such as one dtype.

    A parameter that is larger than its kind's `max_elements` gets its own bucket.
    """
    buckets: list[list[int]] = []
    growing: dict[object, tuple[list[int], int]] = {}
    for index, (size, kind, limit) in enumerate(zip(sizes, kinds, max_elements, strict=True)):
        members, filled = growing.get(kind, ([], 0))
        if not members or filled + size > limit:
            members, filled = [], 0
            buckets.append(members)
        members.append(index)
        growing[kind] = (members, filled + size)
    return buckets


def _slots(own: Sequence[int], sizes: Sequence[int]) -> tuple[tuple[Slot, ...], int]:
    slots, end = [], 0
    for index in own:
        slots.append(Slot(index=index, start=end, stop=end + sizes[index]))
        end += sizes[index]
    return tuple(slots), end
