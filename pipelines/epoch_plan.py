"""Which rows every shard reads in every step of an epoch. Pure: no files, no clock.

The row groups are put in an order drawn from (seed, epoch), each group's rows
in an order drawn from (seed, epoch, group), and the sequence this makes is
dealt to batches by `lanes`. From that follows, by arithmetic alone:

* every row is in exactly one batch of an epoch; every batch has `batch_size`
  rows, but for the last, which is short, never dropped;
* batch s is the same set of rows for any number of shards, so changing
  `num_shards`, also in the middle of an epoch, does not change the training;
* the number of steps is the same on every shard, and each shard knows how many
  rows the others have in a step, without asking them;
* a shard may have no row in a step.

A shard reads one contiguous stretch of the sequence with one read a row group.
While an epoch runs it holds at most two row groups a lane, that is 96 divided
by the number of shards, plus the few it shares with its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ringspark.pipelines.lanes import Deal, Int64Array, OrderedDeal, ShuffledDeal
from ringspark.pipelines.shuffle import permutation

# Kept apart in the key, so that no row group draws the order of the row groups.
_GROUP_ORDER, _ROW_ORDER = 0, 1


@dataclass(frozen=True)
class Piece:
    """Rows of one row group that go to one lane.

    Attributes:
        lane: Index of the lane among the shard's lanes.
        start: First local row of the lane (counting the shard's rows only).
        stop: Local row after the last.
    """

    lane: int
    start: int
    stop: int


@dataclass(frozen=True)
class RowGroupRead:
    """One row group that a shard reads, once in the epoch.

    Attributes:
        row_group: Index into the plan's `row_groups`.
        first_step: Step whose batch first needs it.
        pieces: What it gives to the shard's lanes, in the order of the sequence.
    """

    row_group: int
    first_step: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """The batches of one epoch; see the module's docstring. Made by `plan_epoch`."""

    row_groups: tuple[int, ...]
    num_shards: int
    batch_size: int
    epoch: int
    seed: int
    shuffle: bool

    @cached_property
    def num_rows(self) -> int:
        """Rows of the epoch, over all shards."""
        return sum(self.row_groups)

    @property
    def num_steps(self) -> int:
        """Steps of the epoch, the same on every shard."""
        return -(-self.num_rows // self.batch_size)

    def global_rows(self, step: int) -> int:
        """Returns the rows of the batch of `step` over all shards."""
        start, stop = self._positions(step)
        return stop - start

    def shard_rows(self, step: int, shard: int) -> int:
        """Returns the rows that `shard` has in the batch of `step`; 0 is possible."""
        start, stop = self._positions(step)
        deal = self.shard(shard).deal
        return deal.rank(stop) - deal.rank(start)

    def shard(self, shard: int) -> ShardPlan:
        """Returns the plan of one shard."""
        if not 0 <= shard < self.num_shards:
            raise ValueError(f"shard must be from 0 to {self.num_shards - 1}, got {shard}")
        if shard not in self._shards:
            self._shards[shard] = ShardPlan(self, shard)
        return self._shards[shard]

    def group_order(self) -> Int64Array:
        """Returns the row groups in the order of the epoch's sequence."""
        if not self.shuffle:
            return np.arange(len(self.row_groups), dtype=np.int64)
        return permutation(len(self.row_groups), self.seed, self.epoch, _GROUP_ORDER)

    def row_order(self, row_group: int) -> Int64Array:
        """Returns the rows of a row group in the order of the epoch's sequence."""
        rows = self.row_groups[row_group]
        if not self.shuffle:
            return np.arange(rows, dtype=np.int64)
        return permutation(rows, self.seed, self.epoch, _ROW_ORDER, row_group)

    @cached_property
    def _shards(self) -> dict[int, ShardPlan]:
        return {}

    def _positions(self, step: int) -> tuple[int, int]:
        if not 0 <= step < self.num_steps:
            raise ValueError(f"step must be from 0 to {self.num_steps - 1}, got {step}")
        return step * self.batch_size, min((step + 1) * self.batch_size, self.num_rows)


class ShardPlan:
    """What one shard reads, and how its batches are put together from it.

    Attributes:
        plan: The plan of the whole epoch.
        shard: Which shard this is.
        deal: Which positions the shard owns.
    """

    def __init__(self, plan: EpochPlan, shard: int) -> None:
        self.plan = plan
        self.shard = shard
        self.deal: Deal = (
            ShuffledDeal(plan.num_rows, plan.num_shards, shard)
            if plan.shuffle
            else OrderedDeal(plan.num_rows, plan.num_shards, shard, plan.batch_size)
        )

    @cached_property
    def _group_starts(self) -> dict[int, int]:
        """Row group -> its first row in the sequence."""
        order = self.plan.group_order()
        sizes = np.asarray(self.plan.row_groups, dtype=np.int64)[order]
        starts = np.cumsum(sizes) - sizes
        return dict(zip(order.tolist(), starts.tolist(), strict=True))

    def reads(self, start_step: int = 0) -> list[RowGroupRead]:
        """Returns the row groups to read from `start_step` on, in the order they are needed."""
        start_position = min(start_step * self.plan.batch_size, self.plan.num_rows)
        found: dict[int, tuple[int, list[Piece]]] = {}
        groups = [(start, group) for group, start in self._group_starts.items()]
        starts = np.asarray([start for start, _ in groups], dtype=np.int64)
        for index, lane in enumerate(self.deal.lanes):
            # Local rows that the steps before start_step have used up.
            rows_before = -(-(start_position - lane.position) // lane.step)
            used = self.deal.count(index, min(max(rows_before, 0), lane.length))
            low = max(0, int(np.searchsorted(starts, lane.start, side="right")) - 1)
            high = int(np.searchsorted(starts, lane.start + lane.length, side="left"))
            for group_start, group in groups[low:high]:
                group_stop = group_start + self.plan.row_groups[group]
                start = max(used, self.deal.count(index, max(0, group_start - lane.start)))
                stop = self.deal.count(index, max(0, min(group_stop - lane.start, lane.length)))
                if start >= stop:
                    continue
                row = int(self.deal.rows(index, start, start + 1)[0])
                position = lane.position + row * lane.step
                first, pieces = found.setdefault(group, (position, []))
                pieces.append(Piece(index, start, stop))
                found[group] = (min(first, position), pieces)
        ordered = sorted((position, group, pieces) for group, (position, pieces) in found.items())
        return [
            RowGroupRead(group, position // self.plan.batch_size, tuple(pieces))
            for position, group, pieces in ordered
        ]

    def rows(self, read: RowGroupRead) -> list[Int64Array]:
        """Returns, for every piece of `read`, its rows within the row group, in the lane's order."""
        order = self.plan.row_order(read.row_group)
        group_start = self._group_starts[read.row_group]
        return [
            order[
                self.deal.lanes[piece.lane].start
                - group_start
                + self.deal.rows(piece.lane, piece.start, piece.stop)
            ]
            for piece in read.pieces
        ]

    def bounds(self, start_step: int, stop_step: int) -> list[int]:
        """Returns the shard's row counts before each of the steps, and after the last."""
        size, total = self.plan.batch_size, self.plan.num_rows
        return [self.deal.rank(min(step * size, total)) for step in range(start_step, stop_step + 1)]


def plan_epoch(
    row_groups: Sequence[int],
    *,
    num_shards: int,
    batch_size: int,
    epoch: int,
    seed: int,
    shuffle: bool = True,
) -> EpochPlan:
    """Plans one epoch over row groups of the given sizes.

    Args:
        row_groups: Rows of every row group; 0 is fine.
        num_shards: How many workers share the batches; may exceed the row groups, and the rows.
        batch_size: Rows per step over all shards.
        epoch: Which epoch, from 0.
        seed: Any whole number. (seed, epoch) and `row_groups` fix the batches.
        shuffle: False keeps the order of the files; a shard then owns a slice of every batch.

    Raises:
        ValueError: A count is out of range.
    """
    for name, value, least in (
        ("num_shards", num_shards, 1),
        ("batch_size", batch_size, 1),
        ("epoch", epoch, 0),
    ):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if any(rows < 0 for rows in row_groups):
        raise ValueError(f"row_groups must not be negative, got {min(row_groups)}")
    return EpochPlan(
        row_groups=tuple(int(rows) for rows in row_groups),
        num_shards=num_shards,
        batch_size=batch_size,
        epoch=epoch,
        seed=seed,
        shuffle=shuffle,
    )
