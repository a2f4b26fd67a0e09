"""Which rank holds which elements of a network's parameters: pure arithmetic, the same on every rank.

The parameters lie in buckets, in reverse order of registration, which is about the order in which the
backward pass finishes their gradients. Each rank holds one range of each bucket.

Invariant: every element of every parameter belongs to exactly one rank, and has one place in one bucket.
An even layout cuts through parameters, so that all ranks hold the same number of elements; a whole one
gives every parameter to one rank, and balances the ranks by their sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# As DistributedDataParallel's: large enough for the network's speed, small enough for overlap.
BUCKET_BYTES = 25 << 20


@dataclass(frozen=True, kw_only=True)
class Slot:
    """The place [start, stop) of parameter number `index` in its bucket."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Elements [start, stop) of parameter number `index`: those of rank `rank`, at `offset` of its range."""

    rank: int
    index: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Parameters behind one another, of one dtype.

    Attributes:
        bounds: Rank r holds the elements [bounds[r], bounds[r + 1]); past the last slot is padding.
    """

    slots: tuple[Slot, ...]
    bounds: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return self.bounds[-1]

    @property
    def counts(self) -> list[int]:
        """Elements that each rank holds."""
        return [stop - start for start, stop in zip(self.bounds, self.bounds[1:], strict=False)]

    def pieces(self) -> Iterator[Piece]:
        """What each rank holds of each parameter, without the padding."""
        for rank, (low, high) in enumerate(zip(self.bounds, self.bounds[1:], strict=False)):
            for slot in self.slots:
                start, stop = max(slot.start, low), min(slot.stop, high)
                if start < stop:
                    yield Piece(
                        rank=rank,
                        index=slot.index,
                        start=start - slot.start,
                        stop=stop - slot.start,
                        offset=start - low,
                    )


def even_layout(members: Sequence[Sequence[int]], sizes: Sequence[int], num_ranks: int) -> list[Bucket]:
    """Buckets of which every rank holds the same share.

    Args:
        members: The parameters of each bucket, as `fill_buckets` deals them out.
        sizes: Elements of each parameter.
    """
    buckets = []
    for own in members:
        slots, end = _slots(own, sizes)
        share = -(-end // num_ranks)
        buckets.append(Bucket(slots=slots, bounds=tuple(share * rank for rank in range(num_ranks + 1))))
    return buckets


def whole_layout(members: Sequence[Sequence[int]], sizes: Sequence[int], num_ranks: int) -> list[Bucket]:
    """Buckets in which each parameter is one rank's; arguments as of `even_layout`.

    The largest parameter goes to the rank that has least so far, then the next (Graham 1969: at most 4/3
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
    """Deals parameters out to buckets, in order.

    Args:
        sizes: Elements of each parameter.
        kinds: What the parameters of one bucket must have in common, such as dtype and device.
        max_elements: How many elements a bucket of this parameter's kind may have; a larger parameter has
            one for itself.

    Returns:
        The indices of each bucket's parameters.
    """
    buckets: list[list[int]] = []
    open_ones: dict[object, tuple[list[int], int]] = {}
    for index, (size, kind, limit) in enumerate(zip(sizes, kinds, max_elements, strict=True)):
        members, filled = open_ones.get(kind, ([], 0))
        if not members or filled + size > limit:
            members, filled = [], 0
            buckets.append(members)
        members.append(index)
        open_ones[kind] = (members, filled + size)
    return buckets


def _slots(own: Sequence[int], sizes: Sequence[int]) -> tuple[tuple[Slot, ...], int]:
    slots, end = [], 0
    for index in own:
        slots.append(Slot(index=index, start=end, stop=end + sizes[index]))
        end += sizes[index]
    return tuple(slots), end
