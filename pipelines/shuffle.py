"""Shuffles an epoch: computes permutations, and distributes rows over batches and shards.

Random numbers are the raw bits of the Philox generator (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011). NumPy keeps these the same in all versions, unlike `Generator.permutation`.

The epoch's sequence of rows is split into `NUM_STREAMS` (48) contiguous streams, and batches take rows from
the streams in turn. Each stream has its own class from 0 to 47. Position i of the epoch, counted over all
batches, is row i // 48 of the stream with class i % 48. Batch s of size B has the positions from s * B to
(s + 1) * B, for any number of shards.

With R shards, the rows of each stream are divided into R units: row k of the stream is in unit
k * stride % R. All 48 * R units are numbered, stream by stream, and each shard owns 48 consecutive units. The
classes and the stride follow the golden ratio (Weyl, 1916), which spreads every batch evenly over all shards.

An epoch in file order has one stream, and each shard owns a slice of every batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

MAX_LENGTH = 1 << 40
"""Largest length of a permutation.

In a longer one, fewer than 24 of the 64 bits of a sort key would be random.
"""

NUM_STREAMS = 48
"""Number of streams. It must not change, because another number gives other batches.

With 48 streams, no two shards read the same stream if there are 1, 2, 3, 4, 6, 8, 12, 16, 24 or 48 shards.
"""

_MASK64 = (1 << 64) - 1

_CLASS_STRIDE = 29  # next to 48 * 0.618, and coprime to 48
_STREAM_TO_CLASS = np.argsort(np.arange(NUM_STREAMS) * _CLASS_STRIDE % NUM_STREAMS)


def permutation(length: int, *key: int) -> Int64Array:
    """Returns a permutation of `range(length)` that depends only on `length` and the numbers in `key`.

    Every index gets a 64-bit sort key: random high bits, and the index in the low bits. All keys are
    different, so every sorting algorithm gives the same order.

    >>> permutation(8, 7, 0).tolist()  # seed 7, epoch 0: on every machine, by every version of NumPy
    [2, 3, 7, 5, 4, 1, 0, 6]
    """
    assert 0 <= length < MAX_LENGTH, length
    if length == 0:
        return np.zeros(0, dtype=np.int64)
    # The key's length comes first: SeedSequence pads with zeros, so (1,) and (1, 0) would give the same bits.
    entropy = [len(key), *(part & _MASK64 for part in key)]
    bits = np.random.Philox(np.random.SeedSequence(entropy)).random_raw(length)
    index_mask = np.uint64((1 << (length - 1).bit_length()) - 1)
    # In place: at 100 million row groups each copy takes 0.8 GB.
    bits &= ~index_mask
    bits |= np.arange(length, dtype=np.uint64)
    bits.sort()
    bits &= index_mask
    order: Int64Array = bits.view(np.int64)
    return order


@dataclass(frozen=True)
class ShuffleStream:
    """A contiguous range of the epoch's sequence: `length` rows from `start`.

    Row k of the stream is in position `position + k * step` of the epoch.
    """

    start: int
    length: int
    position: int
    step: int


@lru_cache(maxsize=4)  # all shards of a plan need the same streams
def split_streams(num_rows: int) -> tuple[ShuffleStream, ...]:
    streams, start = [], 0
    for position in _STREAM_TO_CLASS.tolist():
        length = (num_rows + NUM_STREAMS - 1 - position) // NUM_STREAMS
        streams.append(ShuffleStream(start, length, position, NUM_STREAMS))
        start += length
    assert start == num_rows
    return tuple(streams)


class Deal(ABC):
    """The positions of the epoch that one shard owns, and the rows in them.

    The rows of a stream that the shard owns are numbered from 0; these numbers are called local rows.

    Attributes:
        streams: Streams in which the shard owns rows, in the order of the sequence.
        stream_cycle: Repeating order of streams: the i-th owned position takes the next row of
            `streams[stream_cycle[i % len(stream_cycle)]]`.
    """

    streams: tuple[ShuffleStream, ...]
    stream_cycle: Int64Array

    @abstractmethod
    def rank(self, position: int) -> int:
        """Returns how many owned positions come before `position`."""

    @abstractmethod
    def positions(self, start: int, stop: int) -> Int64Array:
        """Returns the owned positions from `start` to `stop`, in ascending order."""

    @abstractmethod
    def counts(self, stream: int, rows: Int64Array) -> Int64Array:
        """Returns how many owned rows come before each of `rows` in `streams[stream]`."""

    @abstractmethod
    def rows_at(self, stream: int, local: Int64Array) -> Int64Array:
        """Converts local rows to row numbers of `streams[stream]`."""

    def count(self, stream: int, row: int) -> int:
        return int(self.counts(stream, np.asarray([row], dtype=np.int64))[0])

    def rows(self, stream: int, start: int, stop: int) -> Int64Array:
        return self.rows_at(stream, np.arange(start, stop, dtype=np.int64))


class ShuffledDeal(Deal):
    def __init__(self, num_rows: int, num_shards: int, shard: int) -> None:
        first, last = shard * NUM_STREAMS // num_shards, ((shard + 1) * NUM_STREAMS - 1) // num_shards
        self.streams = split_streams(num_rows)[first : last + 1]
        self._num_shards = num_shards
        self._period = NUM_STREAMS * num_shards
        # Row k of a stream is in unit k * stride % num_shards. Solving this for k lets a shard look up its
        # own 48 units instead of searching all num_shards.
        row_of_unit = pow(_golden_stride(num_shards), -1, num_shards)
        units = np.arange(shard * NUM_STREAMS, (shard + 1) * NUM_STREAMS, dtype=np.int64)
        # Per stream, the rows that the shard owns out of the num_shards rows of one period.
        self._owned_rows = [
            np.sort(units[units // num_shards == stream] % num_shards * row_of_unit % num_shards)
            for stream in range(first, last + 1)
        ]
        owned = zip(self.streams, self._owned_rows, strict=True)
        positions = np.concatenate([stream.position + rows * NUM_STREAMS for stream, rows in owned])
        stream_index = np.repeat(np.arange(len(self.streams)), [len(rows) for rows in self._owned_rows])
        order = np.argsort(positions)
        self._positions = positions[order]
        self.stream_cycle = _shortest_cycle(stream_index[order])
        assert len(self._positions) == NUM_STREAMS

    def rank(self, position: int) -> int:
        periods, rest = divmod(position, self._period)
        return periods * NUM_STREAMS + int(np.searchsorted(self._positions, rest))

    def positions(self, start: int, stop: int) -> Int64Array:
        owned = np.arange(self.rank(start), self.rank(stop), dtype=np.int64)
        found: Int64Array = owned // NUM_STREAMS * self._period + self._positions[owned % NUM_STREAMS]
        return found

    def counts(self, stream: int, rows: Int64Array) -> Int64Array:
        owned = self._owned_rows[stream]
        if len(owned) == self._num_shards:
            return rows
        periods = rows // self._num_shards  # np.divmod takes six times as long
        rest = rows - periods * self._num_shards
        return periods * len(owned) + np.searchsorted(owned, rest)

    def rows_at(self, stream: int, local: Int64Array) -> Int64Array:
        owned = self._owned_rows[stream]
        if len(owned) == self._num_shards:
            return local
        periods = local // len(owned)
        rows: Int64Array = periods * self._num_shards + owned[local - periods * len(owned)]
        return rows


class OrderedDeal(Deal):
    """The positions that one shard owns if the rows keep the order of the files: a slice of every batch.

    In a batch of b rows, shard r of R owns rows r * b // R to (r + 1) * b // R.
    """

    def __init__(self, num_rows: int, num_shards: int, shard: int, batch_size: int) -> None:
        self.streams = (ShuffleStream(0, num_rows, 0, 1),)
        self.stream_cycle = np.zeros(1, dtype=np.int64)
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

    def positions(self, start: int, stop: int) -> Int64Array:
        return self.rows(0, self.rank(start), self.rank(stop))

    def counts(self, stream: int, rows: Int64Array) -> Int64Array:
        batch = rows // self._batch_size
        rest = rows - batch * self._batch_size
        in_batch: Int64Array = np.clip(rest - self._start, 0, self._width)
        # Only the last batch may be short, and then its slices are narrower.
        in_last = batch >= self._full_batches
        in_batch[in_last] = np.clip(rest[in_last] - self._last_start, 0, self._last_stop - self._last_start)
        return batch * self._width + in_batch

    def rows_at(self, stream: int, local: Int64Array) -> Int64Array:
        full = self._full_batches * self._width
        in_last = self._full_batches * self._batch_size + self._last_start + local - full
        if not self._width:
            return in_last
        in_full = local // self._width * self._batch_size + self._start + local % self._width
        return np.where(local < full, in_full, in_last)


def _shortest_cycle(cycle: Int64Array) -> Int64Array:
    """Returns the shortest prefix of `cycle` that gives the whole cycle if it is repeated."""
    return next(
        cycle[:length]
        for length in range(1, len(cycle) + 1)
        if len(cycle) % length == 0 and (cycle.reshape(-1, length) == cycle[:length]).all()
    )


def _golden_stride(length: int) -> int:
    """Returns the number nearest to 0.618 * length that is coprime to `length`."""
    target = round(length * (math.sqrt(5) - 1) / 2)
    return next(
        stride
        for distance in range(length + 1)
        for stride in (target + distance, target - distance)
        if stride >= 1 and math.gcd(stride, length) == 1
    )
