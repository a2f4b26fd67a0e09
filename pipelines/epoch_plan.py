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
From one step to the next it holds at most two row groups a lane: the one in use,
and one read early because it begins in the lane before. All lanes together hold
96, divided by the number of shards, plus the few shared with neighbours. Row
groups that a step uses up within itself come on top.

The order is kept in int64 arrays that the plans of all shards share; a shard
searches its stretch alone. One of 1,024 shards plans a million row groups in
0.1-0.2 s and 30 MiB, and one of 102,400 plans 100 million in 18 s and 3 GiB
(2 busy cores), but data of that size would be slow to read: beyond 48 shards
lanes are shared, and a row group is read, whole, by up to num_shards / 48 shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index

import numpy as np
import numpy.typing as npt

from ringspark.pipelines.lanes import Deal, Int64Array, OrderedDeal, ShuffledDeal
from ringspark.pipelines.notebook_table import notebook_table
from ringspark.pipelines.shuffle import MAX_LENGTH, permutation

# The first part of every key: without it a row group could draw the order of the row groups.
_GROUP_ORDER, _ROW_ORDER = 0, 1


@dataclass(frozen=True)
class LanePiece:
    """Rows of one row group that go to one lane.

    Attributes:
        lane: Index of the lane among the shard's lanes.
        start: First local row in the lane (local rows count the shard's rows only).
        stop: The local row after the last one.
    """

    lane: int
    start: int
    stop: int


@dataclass(frozen=True)
class RowGroupRead:
    """One row group that a shard reads, once in the epoch.

    Attributes:
        row_group: Index into the plan's `row_groups`.
        sequence_start: Position of its first row in the epoch's sequence.
        first_step: The step whose batch needs it first.
        pieces: The rows it gives to the shard's lanes, in the order of the sequence.
    """

    row_group: int
    sequence_start: int
    first_step: int
    pieces: tuple[LanePiece, ...]


# Plans are compared and hashed by identity: nobody should compare arrays of a million sizes by accident.
@dataclass(frozen=True, kw_only=True, eq=False)
class EpochPlan:
    """The batches of one epoch; see the module's docstring. Made by `plan_epoch`.

    Its arrays are read-only and shared by the plans of all shards.
    """

    row_groups: Int64Array
    num_shards: int
    batch_size: int
    epoch: int
    seed: int
    shuffle: bool

    @cached_property
    def num_rows(self) -> int:
        """Number of rows in the epoch, over all shards."""
        return int(self.row_groups.sum())

    def _repr_html_(self) -> str:
        """Returns what a notebook shows: the numbers of the epoch."""
        rows = [
            ("rows", f"{self.num_rows:,}"),
            ("row groups", f"{len(self.row_groups):,}"),
            ("steps", f"{self.num_steps:,}"),
            ("rows of a step, over all shards", f"{self.batch_size:,}"),
            ("shards", f"{self.num_shards:,}"),
            ("shuffled", f"by seed {self.seed}" if self.shuffle else "no"),
        ]
        return notebook_table(f"Plan of epoch {self.epoch}", ["", ""], rows)

    @property
    def num_steps(self) -> int:
        """Number of steps in the epoch, the same on every shard."""
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

    @cached_property
    def group_order(self) -> Int64Array:
        """The row groups in the order of the epoch's sequence."""
        if not self.shuffle:
            return _read_only(np.arange(len(self.row_groups), dtype=np.int64))
        return _read_only(permutation(len(self.row_groups), self.seed, self.epoch, _GROUP_ORDER))

    @cached_property
    def group_starts(self) -> Int64Array:
        """First row in the sequence of each row group of `group_order`, then the total number of rows."""
        starts = np.zeros(len(self.row_groups) + 1, dtype=np.int64)
        np.cumsum(self.row_groups[self.group_order], out=starts[1:])
        return _read_only(starts)

    def row_order(self, row_group: int) -> Int64Array:
        """Returns the rows of a row group in the order of the epoch's sequence."""
        rows = int(self.row_groups[row_group])
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
    """The row groups that one shard reads, and the way its batches are put together from them.

    Attributes:
        plan: The plan of the whole epoch.
        shard: Index of this shard.
        deal: The positions that the shard owns.
    """

    def __init__(self, plan: EpochPlan, shard: int) -> None:
        self.plan = plan
        self.shard = shard
        self.deal: Deal = (
            ShuffledDeal(plan.num_rows, plan.num_shards, shard)
            if plan.shuffle
            else OrderedDeal(plan.num_rows, plan.num_shards, shard, plan.batch_size)
        )

    def reads(self, start_step: int = 0) -> RowGroupReads:
        """Returns the row groups to read from `start_step` on, in the order they are needed."""
        start_position = min(start_step * self.plan.batch_size, self.plan.num_rows)
        parts = [self._lane_pieces(lane, start_position) for lane in range(len(self.deal.lanes))]
        slots, positions, starts, stops = (np.concatenate(part) for part in zip(*parts, strict=True))
        lanes = np.repeat(np.arange(len(parts), dtype=np.int16), [len(part[0]) for part in parts])
        return RowGroupReads(self.plan, slots, positions, lanes, starts, stops)

    def rows(self, read: RowGroupRead) -> list[Int64Array]:
        """Returns, for every piece of `read`, its rows within the row group, in the lane's order."""
        places = [self._places(read, piece) for piece in read.pieces]
        if not self.plan.shuffle:
            return [place if isinstance(place, np.ndarray) else np.r_[place] for place in places]
        order = self.plan.row_order(read.row_group)
        return [order[place] for place in places]

    def _places(self, read: RowGroupRead, piece: LanePiece) -> slice | Int64Array:
        """Returns which rows of a row group, counted in the sequence's order, a piece has."""
        offset = self.deal.lanes[piece.lane].start - read.sequence_start
        ends = self.deal.rows_at(piece.lane, np.asarray([piece.start, piece.stop - 1]))
        first, last = (ends + offset).tolist()
        if last - first == piece.stop - 1 - piece.start:
            return slice(first, last + 1)  # a view costs nothing, and most shards own whole lanes
        return self.deal.rows(piece.lane, piece.start, piece.stop) + offset

    def _lane_pieces(self, index: int, start_position: int) -> tuple[Int64Array, ...]:
        """Returns (slot, first position, first local row, local row after the last) of a lane's pieces.

        Slots count the row groups of `group_order`. Rows before `start_position` are left out.
        """
        lane, group_starts = self.deal.lanes[index], self.plan.group_starts
        low = max(0, int(np.searchsorted(group_starts, lane.start, side="right")) - 1)
        high = int(np.searchsorted(group_starts, lane.start + lane.length, side="left"))
        rows = np.clip(group_starts[low : high + 1] - lane.start, 0, lane.length)
        counts = self.deal.counts(index, rows)
        # Local rows that the steps before start_position have used up.
        rows_before = -(-(start_position - lane.position) // lane.step)
        used = self.deal.count(index, min(max(rows_before, 0), lane.length))
        starts, stops = np.maximum(counts[:-1], used), counts[1:]
        kept = np.flatnonzero(starts < stops)
        starts = starts[kept]
        positions = lane.position + self.deal.rows_at(index, starts) * lane.step
        return kept + low, positions, starts, stops[kept]

    def bounds(self, start_step: int, stop_step: int) -> list[int]:
        """Returns the shard's row counts before each of the steps, and after the last."""
        size, total = self.plan.batch_size, self.plan.num_rows
        return [self.deal.rank(min(step * size, total)) for step in range(start_step, stop_step + 1)]


class RowGroupReads:
    """The reads of one shard in the order they are needed: arrays, made into objects one by one.

    Making all objects at once would take ten times the memory and most of the planning time.
    """

    def __init__(
        self,
        plan: EpochPlan,
        slots: Int64Array,
        positions: Int64Array,
        lanes: npt.NDArray[np.int16],
        starts: Int64Array,
        stops: Int64Array,
    ) -> None:
        """Takes the pieces in the order of the sequence, so those of one row group are neighbours."""
        is_first = np.ones(len(slots), dtype=np.bool_)
        np.not_equal(slots[1:], slots[:-1], out=is_first[1:])
        firsts = np.flatnonzero(is_first)
        needed_at = np.minimum.reduceat(positions, firsts) if len(firsts) else positions
        # The stable sort is the one that exploits sorted runs, and every lane is sorted already.
        order = np.argsort(needed_at, kind="stable")
        self._plan = plan
        self._slots = slots[firsts][order]
        self._first_steps = needed_at[order] // plan.batch_size
        self._first_pieces = firsts[order]
        self._num_pieces = np.diff(firsts, append=len(slots)).astype(np.int16)[order]
        self._lanes, self._starts, self._stops = lanes, starts, stops

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[RowGroupRead]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, number: int) -> RowGroupRead:
        slot, first = self._slots[number], int(self._first_pieces[number])
        pieces = slice(first, first + int(self._num_pieces[number]))
        return RowGroupRead(
            row_group=int(self._plan.group_order[slot]),
            sequence_start=int(self._plan.group_starts[slot]),
            first_step=int(self._first_steps[number]),
            pieces=tuple(
                map(
                    LanePiece,
                    self._lanes[pieces].tolist(),
                    self._starts[pieces].tolist(),
                    self._stops[pieces].tolist(),
                )
            ),
        )

    @property
    def first_steps(self) -> Int64Array:
        """The step whose batch first needs each read."""
        return self._first_steps

    @property
    def row_groups(self) -> Int64Array:
        """The row group of every read."""
        row_groups: Int64Array = self._plan.group_order[self._slots]
        return row_groups


def plan_epoch(
    row_groups: Sequence[int] | Int64Array,
    *,
    num_shards: int,
    batch_size: int,
    epoch: int,
    seed: int,
    shuffle: bool = True,
) -> EpochPlan:
    """Plans one epoch over row groups of the given sizes.

    Two files of 4 and 3 row groups have 50 rows: three batches of 16 and a short one, of the same rows for
    1 shard as for 3. Over several steps the shards have equally many; in one step a shard may have none.

    >>> sizes = [8, 8, 8, 4, 8, 8, 6]
    >>> plan = plan_epoch(sizes, num_shards=3, batch_size=16, epoch=0, seed=7)
    >>> plan.num_rows, plan.num_steps
    (50, 4)
    >>> [plan.global_rows(step) for step in range(plan.num_steps)]
    [16, 16, 16, 2]
    >>> [[plan.shard_rows(step, shard) for shard in range(3)] for step in range(plan.num_steps)]
    [[7, 6, 3], [6, 3, 7], [3, 7, 6], [1, 1, 0]]
    >>> alone = plan_epoch(sizes, num_shards=1, batch_size=16, epoch=0, seed=7)
    >>> alone.group_order.tolist() == plan.group_order.tolist()
    True

    Args:
        row_groups: Rows of every row group; 0 is fine. A read-only int64 array is not copied.
        num_shards: How many workers share the batches; there may be more than row groups or rows.
        batch_size: Rows per step over all shards.
        epoch: Which epoch, from 0.
        seed: Any whole number. (seed, epoch) and `row_groups` fix the batches.
        shuffle: False keeps the order of the files; a shard then owns a slice of every batch.

    Raises:
        ValueError: A count is not a whole number, or is out of range.
    """
    return EpochPlan(
        row_groups=_row_counts(row_groups),
        num_shards=_whole_number("num_shards", num_shards, least=1),
        batch_size=_whole_number("batch_size", batch_size, least=1),
        epoch=_whole_number("epoch", epoch, least=0),
        seed=_whole_number("seed", seed),
        shuffle=shuffle,
    )


def _row_counts(row_groups: Sequence[int] | Int64Array) -> Int64Array:
    counts = np.asarray(row_groups)
    if counts.ndim == 1 and not len(counts):
        counts = np.zeros(0, dtype=np.int64)  # NumPy would make an empty list float64
    if counts.ndim != 1 or counts.dtype.kind not in "iu":
        raise ValueError(
            "row_groups must be whole numbers in one dimension, "
            f"got {counts.ndim} dimensions of dtype {counts.dtype}"
        )
    if len(counts) and counts.min() < 0:
        raise ValueError(f"row_groups must not be negative, got {counts.min()}")
    if len(counts) and counts.max() >= MAX_LENGTH:
        raise ValueError(f"row_groups must have fewer than 2**40 rows each, got {counts.max()}")
    # Floats do not wrap around; the limit, half of what int64 holds, leaves room for their error.
    if counts.sum(dtype=np.float64) >= 2.0**62:
        raise ValueError("row_groups must have fewer than 2**62 rows together")
    if counts.flags.writeable:
        counts = counts.astype(np.int64)  # a copy: the caller may change the array later
    return _read_only(counts.astype(np.int64, copy=False))


def _whole_number(name: str, value: int, *, least: int | None = None) -> int:
    try:
        number = index(value)  # turns NumPy's integers, which can overflow, into Python's
    except TypeError:
        raise ValueError(f"{name} must be a whole number, got {value!r}") from None
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number


def _read_only(array: Int64Array) -> Int64Array:
    array.setflags(write=False)
    return array
