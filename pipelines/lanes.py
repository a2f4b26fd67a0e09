"""Lanes: how one epoch's rows are dealt to batches and to shards. Pure arithmetic.

The epoch's rows form one sequence of N rows. A shuffled epoch cuts it into
`NUM_LANES` contiguous lanes and deals positions over them like cards: position
i is row i // NUM_LANES of the lane of class i % NUM_LANES. Batch s is positions
[s * B, (s + 1) * B), so it never depends on the number of shards.

Shards are dealt from the same table. Let a lane have R units, one for each
shard, 48 * R units in all; shard r owns the 48 units from r * 48. Row k of a
lane belongs to unit k * stride % R of that lane. So a shard owns whole lanes
and at most two it shares, all neighbours: it reads one contiguous stretch of
the sequence. The dealing repeats after 48 * R positions, of which every shard
owns exactly 48. Classes map to lanes, and rows to units, by multiples of the
golden section (Weyl, 1916): any run of positions, and so every batch, then
falls on all shards evenly to within a few rows.

An epoch in file order has one lane; a shard owns a slice of every batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

NUM_LANES = 48
"""A constant of the data order: another value is another sequence of batches.
48 because 1, 2, 3, 4, 6, 8, 12, 16, 24 and 48 shards then share no lane."""

_CLASS_STRIDE = 29  # next to 48 * 0.618, and coprime to 48
_CLASS_TO_LANE = np.arange(NUM_LANES) * _CLASS_STRIDE % NUM_LANES
_LANE_TO_CLASS = np.argsort(_CLASS_TO_LANE)


@dataclass(frozen=True)
class Lane:
    """A contiguous stretch of the epoch's sequence.

    Attributes:
        start: First row in the sequence.
        length: Number of rows.
        position: Position of the lane's row 0; row k is at `position + k * step`.
        step: Distance between neighbouring rows, in positions.
    """

    start: int
    length: int
    position: int
    step: int


@lru_cache(maxsize=4)  # all shards of a plan ask for the same lanes
def shuffled_lanes(num_rows: int) -> tuple[Lane, ...]:
    """Cuts a sequence of `num_rows` rows into `NUM_LANES` lanes, in the order of the sequence."""
    lanes, start = [], 0
    for position in _LANE_TO_CLASS.tolist():
        length = (num_rows + NUM_LANES - 1 - position) // NUM_LANES
        lanes.append(Lane(start, length, position, NUM_LANES))
        start += length
    assert start == num_rows
    return tuple(lanes)


class Deal(ABC):
    """Which positions one shard owns, and which row of which lane each is.

    The rows of a lane that the shard owns are numbered from 0; these are its local rows.

    Attributes:
        lanes: The lanes that hold rows of this shard, in the order of the sequence.
        lane_cycle: Owned position number i takes the next row of `lanes[lane_cycle[i % len(lane_cycle)]]`.
    """

    lanes: tuple[Lane, ...]
    lane_cycle: Int64Array

    def lane_of(self, start: int, stop: int) -> Int64Array:
        """Returns the index into `lanes` for each of the owned positions number `start` to `stop`."""
        lanes: Int64Array = self.lane_cycle[np.arange(start, stop) % len(self.lane_cycle)]
        return lanes

    @abstractmethod
    def rank(self, position: int) -> int:
        """Returns how many of the positions before `position` the shard owns."""

    @abstractmethod
    def counts(self, lane: int, rows: Int64Array) -> Int64Array:
        """Returns, for each of `rows`, how many rows before it in `lanes[lane]` the shard owns."""

    @abstractmethod
    def rows_at(self, lane: int, local: Int64Array) -> Int64Array:
        """Returns the rows within `lanes[lane]` of the local rows `local`."""

    def count(self, lane: int, row: int) -> int:
        """Returns how many of the rows before `row` of `lanes[lane]` the shard owns."""
        return int(self.counts(lane, np.asarray([row], dtype=np.int64))[0])

    def rows(self, lane: int, start: int, stop: int) -> Int64Array:
        """Returns the rows within `lanes[lane]` of its local rows `start` to `stop`."""
        return self.rows_at(lane, np.arange(start, stop, dtype=np.int64))


class ShuffledDeal(Deal):
    """One shard's part of `NUM_LANES` lanes."""

    def __init__(self, num_rows: int, num_shards: int, shard: int) -> None:
        first, last = shard * NUM_LANES // num_shards, ((shard + 1) * NUM_LANES - 1) // num_shards
        self.lanes = shuffled_lanes(num_rows)[first : last + 1]
        self._num_shards = num_shards
        self._period = NUM_LANES * num_shards
        # Row k of a lane is in unit k * stride % num_shards. Solving this for k lets a shard look up its
        # own 48 units instead of searching all num_shards.
        row_of_unit = pow(_golden_stride(num_shards), -1, num_shards)
        units = np.arange(shard * NUM_LANES, (shard + 1) * NUM_LANES, dtype=np.int64)
        # For each lane, the rows that the shard owns out of the num_shards rows of one period.
        self._owned_rows = [
            np.sort(units[units // num_shards == lane] % num_shards * row_of_unit % num_shards)
            for lane in range(first, last + 1)
        ]
        positions = [
            lane.position + rows * NUM_LANES for lane, rows in zip(self.lanes, self._owned_rows, strict=True)
        ]
        lane_index = np.repeat(np.arange(len(self.lanes)), [len(rows) for rows in self._owned_rows])
        order = np.argsort(np.concatenate(positions))
        self._positions = np.concatenate(positions)[order]
        self.lane_cycle = _shortest_cycle(lane_index[order])
        assert len(self._positions) == NUM_LANES

    def rank(self, position: int) -> int:
        periods, rest = divmod(position, self._period)
        return periods * NUM_LANES + int(np.searchsorted(self._positions, rest))

    def counts(self, lane: int, rows: Int64Array) -> Int64Array:
        owned = self._owned_rows[lane]
        if len(owned) == self._num_shards:
            return rows
        periods = rows // self._num_shards
        rest = rows - periods * self._num_shards
        return periods * len(owned) + np.searchsorted(owned, rest)

    def rows_at(self, lane: int, local: Int64Array) -> Int64Array:
        owned = self._owned_rows[lane]
        if len(owned) == self._num_shards:
            return local
        periods = local // len(owned)
        rows: Int64Array = periods * self._num_shards + owned[local - periods * len(owned)]
        return rows


class OrderedDeal(Deal):
    """One shard's slices of batches in file order.

    Shard r of R owns rows [r * b // R, (r + 1) * b // R) of a batch of b rows.
    """

    def __init__(self, num_rows: int, num_shards: int, shard: int, batch_size: int) -> None:
        self.lanes = (Lane(0, num_rows, 0, 1),)
        self.lane_cycle = np.zeros(1, dtype=np.int64)
        self._batch_size = batch_size
        self._full_batches, last = divmod(num_rows, batch_size)
        self._start, self._stop = (part * batch_size // num_shards for part in (shard, shard + 1))
        self._width = self._stop - self._start
        self._last_start, self._last_stop = (part * last // num_shards for part in (shard, shard + 1))

    def rank(self, position: int) -> int:
        batch, rest = divmod(position, self._batch_size)
        start, stop = (
            (self._start, self._stop) if batch < self._full_batches else (self._last_start, self._last_stop)
        )
        return batch * self._width + min(max(rest - start, 0), stop - start)

    def counts(self, lane: int, rows: Int64Array) -> Int64Array:
        batch = rows // self._batch_size
        rest = rows - batch * self._batch_size
        in_batch: Int64Array = np.clip(rest - self._start, 0, self._width)
        # Only the last batch may be short, and then its slices are narrower.
        in_last = batch >= self._full_batches
        in_batch[in_last] = np.clip(rest[in_last] - self._last_start, 0, self._last_stop - self._last_start)
        return batch * self._width + in_batch

    def rows_at(self, lane: int, local: Int64Array) -> Int64Array:
        full = self._full_batches * self._width
        in_last = self._full_batches * self._batch_size + self._last_start + local - full
        if not self._width:
            return in_last
        in_full = local // self._width * self._batch_size + self._start + local % self._width
        return np.where(local < full, in_full, in_last)


def _shortest_cycle(cycle: Int64Array) -> Int64Array:
    """Returns the start of a cycle that gives the whole of it when repeated."""
    return next(
        cycle[:length]
        for length in range(1, len(cycle) + 1)
        if len(cycle) % length == 0 and (cycle.reshape(-1, length) == cycle[:length]).all()
    )


def _golden_stride(length: int) -> int:
    """Returns the number next to 0.618 * length that is coprime to `length`."""
    target = round(length * (math.sqrt(5) - 1) / 2)
    return next(
        stride
        for distance in range(length + 1)
        for stride in (target + distance, target - distance)
        if stride >= 1 and math.gcd(stride, length) == 1
    )
