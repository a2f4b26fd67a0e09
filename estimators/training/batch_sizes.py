"""The batch size of every epoch (a schedule after Smith et al. 2018), and the resulting optimizer steps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSizes:
    """Rows per optimizer step over all ranks: `sizes[i]` from epoch `starts[i]`, counted from 0."""

    epochs: int
    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, batch_size: int, schedule: Sequence[Sequence[int]], epochs: int) -> BatchSizes:
        """Makes the sizes; `schedule` has pairs (first epoch of a size, size), epochs counted from 1."""
        changes = [(epoch - 1, size) for epoch, size in schedule if epoch <= epochs]
        starts, sizes = zip((0, batch_size), *changes, strict=True)
        return cls(epochs, tuple(starts), tuple(sizes))

    @property
    def largest(self) -> int:
        return max(self.sizes)

    @property
    def smallest(self) -> int:
        return min(self.sizes)

    def size(self, epoch: int) -> int:
        return self.sizes[bisect_right(self.starts, epoch) - 1]

    def twice_each(self) -> list[int]:
        """Returns the first two epochs of each size; unshuffled epochs of one size have the same batches."""
        stops = (*self.starts[1:], self.epochs)
        spans = zip(self.starts, stops, strict=True)
        return [epoch for start, stop in spans for epoch in range(start, min(start + 2, stop))]


@dataclass(frozen=True)
class Steps:
    batches: BatchSizes
    num_rows: int

    @property
    def total(self) -> int:
        return self.before(self.batches.epochs)

    def in_epoch(self, epoch: int) -> int:
        """Returns the steps of an epoch; the last batch may be short."""
        return -(-self.num_rows // self.batches.size(epoch))

    def before(self, epoch: int) -> int:
        starts = self.batches.starts
        stops = (*starts[1:], max(epoch, starts[-1]))
        spans = zip(starts, stops, strict=True)
        return sum(self.in_epoch(start) * max(0, min(stop, epoch) - start) for start, stop in spans)

    def after(self, epochs: float) -> int:
        """Returns the number of steps in `epochs` epochs, which may be a fraction; rounds to a whole step."""
        whole = int(epochs)
        return self.before(whole) + round((epochs - whole) * self.in_epoch(whole))

    def epoch_of(self, step: int) -> int:
        starts = self.batches.starts
        span = bisect_right([self.before(start) for start in starts], step) - 1
        start = starts[span]
        return start + (step - self.before(start)) // max(1, self.in_epoch(start))
