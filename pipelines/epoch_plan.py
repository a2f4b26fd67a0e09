"""Plans which rows every shard reads in every step of an epoch. The plan depends only on its arguments.

Row groups are shuffled by (seed, epoch), and the rows of a group by (seed, epoch, group). This gives the
epoch's sequence of rows. The module `shuffle` distributes the sequence over batches and shards:

- Every row is in one batch of an epoch. The last batch may be short but is never dropped.
- The rows of a batch do not depend on the number of shards, so this number may change within an epoch.
- A shard reads a contiguous part of the sequence, and each row group of this part once.
- Batches take rows in turn from 48 streams, which are contiguous parts of the sequence. Two row groups per
  stream are in memory, so a shard holds about 96 / num_shards row groups at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index

import numpy as np
import numpy.typing as npt

from ringspark.pipelines.notebook_table import notebook_table
from ringspark.pipelines.shuffle import MAX_LENGTH, Deal, Int64Array, OrderedDeal, ShuffledDeal, permutation

# First part of every key, so that the orders of row groups and of rows never share a key.
_GROUP_ORDER, _ROW_ORDER = 0, 1


@dataclass(frozen=True)
class StreamSlice:
    """Local rows `start` to `stop` of a stream (see `Deal`), which a shard reads from one row group."""

    stream: int
    start: int
    stop: int


@dataclass(frozen=True)
class RowGroupRead:
    """A row group that a shard reads once per epoch; `row_group` is an index into the plan's `row_groups`.

    Attributes:
        sequence_start: Position of the row group's first row in the epoch's sequence.
        first_step: First step whose batch needs a row of the group.
    """

    row_group: int
    sequence_start: int
    first_step: int
    slices: tuple[StreamSlice, ...]


# Plans are compared and hashed by identity, so nobody compares arrays of a million sizes by accident.
@dataclass(frozen=True, kw_only=True, eq=False)
class EpochPlan:
    """Batches of one epoch, made by `plan_epoch`. The plans of all shards share its read-only arrays."""

    row_groups: Int64Array
    num_shards: int
    batch_size: int
    epoch: int
    seed: int
    shuffle: bool

    @cached_property
    def num_rows(self) -> int:
        """Number of rows over all shards."""
        return int(self.row_groups.sum())

    def _repr_html_(self) -> str:
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
        """Number of steps; the same on all shards."""
        return -(-self.num_rows // self.batch_size)

    def global_rows(self, step: int) -> int:
        """Returns the number of rows of a step over all shards."""
        start, stop = self._positions(step)
        return stop - start

    def shard_rows(self, step: int, shard: int) -> int:
        """Returns the number of rows of a step on one shard; it may be 0."""
        start, stop = self._positions(step)
        deal = self.shard(shard).deal
        return deal.rank(stop) - deal.rank(start)

    def shard_positions(self, step: int, shard: int) -> Int64Array:
        """Returns the positions of a shard's rows among the step's rows of all shards, in ascending order."""
        start, stop = self._positions(step)
        return self.shard(shard).deal.positions(start, stop) - start

    def shard(self, shard: int) -> ShardPlan:
        if not 0 <= shard < self.num_shards:
            raise ValueError(f"shard must be from 0 to {self.num_shards - 1}, got {shard}")
        if shard not in self._shards:
            self._shards[shard] = ShardPlan(self, shard)
        return self._shards[shard]

    @cached_property
    def group_order(self) -> Int64Array:
        if not self.shuffle:
            return _read_only(np.arange(len(self.row_groups), dtype=np.int64))
        return _read_only(permutation(len(self.row_groups), self.seed, self.epoch, _GROUP_ORDER))

    @cached_property
    def group_starts(self) -> Int64Array:
        """First position of each row group, sorted like `group_order`; the last entry is `num_rows`."""
        starts = np.zeros(len(self.row_groups) + 1, dtype=np.int64)
        np.cumsum(self.row_groups[self.group_order], out=starts[1:])
        return _read_only(starts)

    def row_order(self, row_group: int) -> Int64Array:
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
    def __init__(self, plan: EpochPlan, shard: int) -> None:
        self.plan = plan
        self.shard = shard
        self.deal: Deal = (
            ShuffledDeal(plan.num_rows, plan.num_shards, shard)
            if plan.shuffle
            else OrderedDeal(plan.num_rows, plan.num_shards, shard, plan.batch_size)
        )

    def reads(self, start_step: int = 0) -> RowGroupReads:
        """Returns the row groups that steps from `start_step` on need, in the order of their first use."""
        start_position = min(start_step * self.plan.batch_size, self.plan.num_rows)
        parts = [self._stream_slices(stream, start_position) for stream in range(len(self.deal.streams))]
        slots, positions, starts, stops = map(np.concatenate, zip(*parts, strict=True))
        streams = np.repeat(np.arange(len(parts), dtype=np.int16), [len(part[0]) for part in parts])
        return RowGroupReads(self.plan, slots, positions, streams, starts, stops)

    def rows(self, read: RowGroupRead) -> list[Int64Array]:
        """Returns, for each of `read.slices`, the indexes of the slice's rows within the row group."""
        places = []
        for span in read.slices:
            offset = self.deal.streams[span.stream].start - read.sequence_start
            places.append(self.deal.rows(span.stream, span.start, span.stop) + offset)
        if not self.plan.shuffle:
            return places
        order = self.plan.row_order(read.row_group)
        return [order[place] for place in places]

    def _stream_slices(self, index: int, start_position: int) -> tuple[Int64Array, ...]:
        """Returns arrays (slot, first position, start, stop), with an entry per `StreamSlice` of a stream.

        A slot is an index into `group_order`. A position numbers the rows of all batches in order; rows
        before `start_position` are left out.
        """
        stream, group_starts = self.deal.streams[index], self.plan.group_starts
        low = max(0, int(np.searchsorted(group_starts, stream.start, side="right")) - 1)
        high = int(np.searchsorted(group_starts, stream.start + stream.length, side="left"))
        rows = np.clip(group_starts[low : high + 1] - stream.start, 0, stream.length)
        counts = self.deal.counts(index, rows)
        # Local rows that earlier steps have used.
        rows_before = -(-(start_position - stream.position) // stream.step)
        used = self.deal.count(index, min(max(rows_before, 0), stream.length))
        starts, stops = np.maximum(counts[:-1], used), counts[1:]
        kept = np.flatnonzero(starts < stops)
        starts = starts[kept]
        positions = stream.position + self.deal.rows_at(index, starts) * stream.step
        return kept + low, positions, starts, stops[kept]

    def bounds(self, start_step: int, stop_step: int) -> list[int]:
        """Returns how many of the shard's rows come before each step from `start_step` to `stop_step`."""
        size, total = self.plan.batch_size, self.plan.num_rows
        return [self.deal.rank(min(step * size, total)) for step in range(start_step, stop_step + 1)]


class RowGroupReads:
    """The row groups that a shard reads, in the order of their first use.

    They are stored as arrays. As objects they would take ten times the memory, and most of the planning time.
    """

    def __init__(
        self,
        plan: EpochPlan,
        slots: Int64Array,
        positions: Int64Array,
        streams: npt.NDArray[np.int16],
        starts: Int64Array,
        stops: Int64Array,
    ) -> None:
        is_first = np.ones(len(slots), dtype=np.bool_)
        np.not_equal(slots[1:], slots[:-1], out=is_first[1:])
        firsts = np.flatnonzero(is_first)
        needed_at = np.minimum.reduceat(positions, firsts) if len(firsts) else positions
        # The stable sort exploits sorted runs, and every stream is already sorted.
        order = np.argsort(needed_at, kind="stable")
        self._plan = plan
        self._slots = slots[firsts][order]
        self.first_steps = needed_at[order] // plan.batch_size
        self._first_slices = firsts[order]
        self._num_slices = np.diff(firsts, append=len(slots)).astype(np.int16)[order]
        self._streams, self._starts, self._stops = streams, starts, stops

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[RowGroupRead]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, number: int) -> RowGroupRead:
        slot, first = self._slots[number], int(self._first_slices[number])
        spans = slice(first, first + int(self._num_slices[number]))
        columns = (column[spans].tolist() for column in (self._streams, self._starts, self._stops))
        return RowGroupRead(
            row_group=int(self._plan.group_order[slot]),
            sequence_start=int(self._plan.group_starts[slot]),
            first_step=int(self.first_steps[number]),
            slices=tuple(map(StreamSlice, *columns)),
        )

    @property
    def row_groups(self) -> Int64Array:
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
    """Plans one epoch; `row_groups` gives the sizes of the row groups.

    >>> sizes = [8, 8, 8, 4, 8, 8, 6]
    >>> plan = plan_epoch(sizes, num_shards=3, batch_size=16, epoch=0, seed=7)
    >>> [[plan.shard_rows(step, shard) for shard in range(3)] for step in range(plan.num_steps)]
    [[7, 6, 3], [6, 3, 7], [3, 7, 6], [1, 1, 0]]

    Args:
        row_groups: Number of rows of each row group, which may be 0. A read-only int64 array is not copied.
        num_shards: Number of workers that share the batches. It may exceed the number of row groups or rows.
        batch_size: Rows per step over all shards.
        epoch: Number of the epoch, counted from 0.
        seed: Any whole number. The seed, the epoch and `row_groups` determine the batches.
        shuffle: False keeps the rows in the order of the files. Each shard then has a slice of every batch.

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
        counts = np.zeros(0, dtype=np.int64)  # NumPy makes an empty list float64
    if counts.ndim != 1 or counts.dtype.kind not in "iu":
        raise ValueError(
            "row_groups must be whole numbers in one dimension, "
            f"got {counts.ndim} dimensions of dtype {counts.dtype}"
        )
    if len(counts) and counts.min() < 0:
        raise ValueError(f"row_groups must not be negative, got {counts.min()}")
    if len(counts) and counts.max() >= MAX_LENGTH:
        raise ValueError(f"row_groups must have fewer than 2**40 rows each, got {counts.max()}")
    # Floats do not overflow; the limit, half of int64's range, leaves room for their error.
    if counts.sum(dtype=np.float64) >= 2.0**62:
        raise ValueError("row_groups must have fewer than 2**62 rows in total")
    if counts.flags.writeable:
        counts = counts.astype(np.int64)  # copies, because the caller may change the array later
    return _read_only(counts.astype(np.int64, copy=False))


def _whole_number(name: str, value: int, *, least: int | None = None) -> int:
    try:
        number = index(value)  # NumPy integers can overflow, Python's cannot
    except TypeError:
        raise ValueError(f"{name} must be a whole number, got {value!r}") from None
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number


def _read_only(array: Int64Array) -> Int64Array:
    array.setflags(write=False)
    return array
