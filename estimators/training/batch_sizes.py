"""The batch size of every epoch, and the optimizer steps that follow from it. Pure: no files, no torch.

A training has one batch size, or a schedule of them by epoch (Smith et al. 2018). Everything that counts
steps asks here, on the driver as on the ranks, so that all of them agree about the position of a training.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSizes:
    """Rows per optimizer step over all ranks, by epoch; epochs count from 0.

    Attributes:
        epochs: Number of epochs of the training.
        starts: First epoch of each size, rising from 0. All lie within the training.
        sizes: The sizes, one per entry of `starts`.
    """

    epochs: int
    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, batch_size: int, schedule: Sequence[Sequence[int]], epochs: int) -> BatchSizes:
        """Returns the sizes that two settings say.

        Args:
            batch_size: Size of the first epoch.
            schedule: Pairs (epoch, size) in the order of their epochs, which count from 1 here; a size
                holds from its epoch on.
            epochs: Number of epochs; sizes that begin later are left out.
        """
        changes = [(epoch - 1, size) for epoch, size in schedule if epoch <= epochs]
        starts, sizes = zip((0, batch_size), *changes, strict=True)
        return cls(epochs, tuple(starts), tuple(sizes))

    @property
    def largest(self) -> int:
        """The largest size: what has to fit into memory."""
        return max(self.sizes)

    @property
    def smallest(self) -> int:
        """The smallest size: what has to give every rank a row."""
        return min(self.sizes)

    def size(self, epoch: int) -> int:
        """Returns the size of an epoch."""
        return self.sizes[bisect_right(self.starts, epoch) - 1]

    def twice_each(self) -> list[int]:
        """Returns the first two epochs of each size: all that an order without a shuffle has to tell."""
        stops = (*self.starts[1:], self.epochs)
        pieces = zip(self.starts, stops, strict=True)
        return [epoch for start, stop in pieces for epoch in range(start, min(start + 2, stop))]


@dataclass(frozen=True)
class Steps:
    """The optimizer steps of every epoch over `num_rows` training rows."""

    batches: BatchSizes
    num_rows: int

    @property
    def total(self) -> int:
        """Optimizer steps of the whole training."""
        return self.before(self.batches.epochs)

    def in_epoch(self, epoch: int) -> int:
        """Returns the steps of an epoch; the last batch may be short."""
        return -(-self.num_rows // self.batches.size(epoch))

    def before(self, epoch: int) -> int:
        """Returns the steps of all epochs before this one."""
        starts = self.batches.starts
        stops = (*starts[1:], max(epoch, starts[-1]))
        pieces = zip(starts, stops, strict=True)
        return sum(self.in_epoch(start) * max(0, min(stop, epoch) - start) for start, stop in pieces)

    def after(self, epochs: float) -> int:
        """Returns the steps of so many epochs, of which the last may be a part, to the nearest step."""
        whole = int(epochs)
        return self.before(whole) + round((epochs - whole) * self.in_epoch(whole))

    def epoch_of(self, step: int) -> int:
        """Returns the epoch of a step, which counts from 0 over the whole training."""
        starts = self.batches.starts
        piece = bisect_right([self.before(start) for start in starts], step) - 1
        start = starts[piece]
        return start + (step - self.before(start)) // max(1, self.in_epoch(start))
