"""From row groups to batches: everything that all readers share.

An engine only has to yield row groups in the order it is told. What belongs to
which batch is `plan_epoch`'s business and is done here once, so every engine
gives the same bytes. Row groups are permuted and cut into lanes when they
arrive; batches are put together for many steps at a time (a block), because
one large gather is several times faster than a small one per step.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ringspark.pipelines import storage
from ringspark.pipelines.columns import Column
from ringspark.pipelines.epoch_plan import EpochPlan, RowGroupRead, ShardPlan, plan_epoch
from ringspark.pipelines.manifest import ShardManifest
from ringspark.pipelines.readers.prefetch import prefetch

Batch = dict[str, npt.NDArray[Any]]

# A block is put together at once: large enough that NumPy calls do not count, small
# enough to stay in the processor's cache (twice the size takes twice the time).
_BLOCK_ROWS = 12_288
_BLOCK_BYTES = 8 << 20
_PREFETCHED_BLOCKS = 2


class ShardReader(ABC):
    """Reads one shard's batches of any epoch. Made by `open_reader`; one engine a subclass.

    Attributes:
        manifest: The shards; every file of it is read, so `select` a split first.
        columns: The columns of a batch, in order.
        shard: Which shard this is.
        num_shards: How many there are.
        batch_size: Rows per step over all shards.
        seed: Seed of the order.
        shuffle: False keeps the order of the files.
    """

    engine: ClassVar[str]

    def __init__(
        self,
        manifest: ShardManifest,
        columns: Sequence[str] | None = None,
        shard: int = 0,
        num_shards: int = 1,
        batch_size: int = 1024,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        if isinstance(columns, str) or (columns is not None and not columns):
            raise ValueError(f"columns must be a list of at least one column name, got {columns!r}")
        names = (
            [column.name for column in manifest.columns] if columns is None else list(dict.fromkeys(columns))
        )
        self.manifest = manifest
        self.columns: tuple[Column, ...] = tuple(manifest.column(name) for name in names)
        self.shard = shard
        self.num_shards = num_shards
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self._row_groups = manifest.row_groups
        self._located = manifest.locate()
        self.plan(0).shard(shard)  # refuses numbers out of range here rather than in the first epoch

    @property
    def num_steps(self) -> int:
        """Steps of every epoch, the same on every shard."""
        return -(-sum(self._row_groups) // self.batch_size)

    def plan(self, epoch: int) -> EpochPlan:
        """Returns the plan of an epoch, for all shards."""
        return plan_epoch(
            self._row_groups,
            num_shards=self.num_shards,
            batch_size=self.batch_size,
            epoch=epoch,
            seed=self.seed,
            shuffle=self.shuffle,
        )

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """Yields the shard's batches of an epoch, one for every step from `start_step`.

        A thread reads ahead. Close the iterator, or let it end, and the thread is gone.

        Yields:
            Column name -> array of shape (rows,) or (rows, length), in the order of the epoch's
            positions; writable, and shared with no other batch. A shard without rows in a step
            gets arrays of 0 rows. Rows differ by a few between steps; the sum over shards does not.

        Raises:
            RuntimeError: A row group cannot be read; names the file and the row group.
        """
        if not 0 <= start_step <= self.num_steps:
            raise ValueError(f"start_step must be from 0 to {self.num_steps}, got {start_step}")
        return self._batches(self.plan(epoch).shard(self.shard), start_step)

    @abstractmethod
    def read_row_groups(self, indexes: Sequence[int]) -> Iterator[Batch]:
        """Yields the columns of the row groups with these indexes, in exactly this order.

        Indexes count over the files of the manifest in order. They may repeat. An error must be
        raised as `self.read_error(index, error)`. Closing the iterator frees files and threads.
        """

    def locate(self, index: int) -> tuple[str, int]:
        """Returns the URI of the file, and the row group within it, of a row group index."""
        file, row_group = self._located[index]
        return storage.join(self.manifest.uri, file.path), row_group

    def read_error(self, index: int, error: BaseException) -> RuntimeError:
        """Returns the error to raise when a row group cannot be read."""
        uri, row_group = self.locate(index)
        return RuntimeError(
            f"reading row group {row_group} of {os.fspath(uri)!r} failed ({type(error).__name__}: {error}); "
            "if the file is damaged, write the shards again"
        )

    def _batches(self, plan: ShardPlan, start_step: int) -> Iterator[Batch]:
        with closing(prefetch(self._blocks(plan, start_step), _PREFETCHED_BLOCKS)) as blocks:
            for block, bounds in blocks:
                for start, stop in pairwise(bounds):
                    yield {name: values[start:stop] for name, values in block.items()}

    def _blocks(self, plan: ShardPlan, start_step: int) -> Iterator[tuple[Batch, list[int]]]:
        """Yields several steps' rows at once, with the bounds of each step in them."""
        reads = plan.reads(start_step)
        lanes = [_LaneBuffer(self.columns) for _ in plan.deal.lanes]
        waiting = deque(reads)
        num_steps, block_steps = plan.plan.num_steps, self._block_steps()
        with closing(self.read_row_groups([read.row_group for read in reads])) as row_groups:  # type: ignore[type-var]
            for first in range(start_step, num_steps, block_steps):
                last = min(first + block_steps, num_steps)
                while waiting and waiting[0].first_step < last:
                    _deal_row_group(plan, waiting.popleft(), next(row_groups), lanes)
                bounds = plan.bounds(first, last)
                block = _assemble(lanes, plan.deal.lane_of(bounds[0], bounds[-1]), self.columns)
                yield block, [bound - bounds[0] for bound in bounds]

    def _block_steps(self) -> int:
        row_bytes = sum(column.row_bytes for column in self.columns)
        step_bytes = max(1, row_bytes * self.batch_size // self.num_shards)
        return max(1, min(_BLOCK_ROWS // self.batch_size, _BLOCK_BYTES // step_bytes))


class _LaneBuffer:
    """The rows of one lane that are in memory and not used yet, in order."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._names = [column.name for column in columns]
        self._pieces: deque[tuple[int, Batch]] = deque()  # (first local row, columns)
        self._next: int | None = None

    def add(self, start: int, piece: Batch) -> None:
        """Takes rows from local row `start` on. A piece may arrive before those in front of it."""
        self._pieces.append((start, piece))
        if len(self._pieces) > 1 and self._pieces[-2][0] > start:
            self._pieces = deque(sorted(self._pieces, key=lambda item: item[0]))

    def take(self, num_rows: int) -> list[Batch]:
        """Removes and returns the next rows, as views."""
        taken = []
        while num_rows:
            start, piece = self._pieces[0]
            self._next = start if self._next is None else self._next
            offset, rows = self._next - start, len(piece[self._names[0]])
            assert 0 <= offset < rows, "a lane was read out of order"
            stop = min(rows, offset + num_rows)
            taken.append({name: piece[name][offset:stop] for name in self._names})
            num_rows -= stop - offset
            self._next += stop - offset
            if stop == rows:
                self._pieces.popleft()
        return taken


def _deal_row_group(plan: ShardPlan, read: RowGroupRead, row_group: Batch, lanes: list[_LaneBuffer]) -> None:
    for piece, rows in zip(read.pieces, plan.rows(read), strict=True):
        lanes[piece.lane].add(
            piece.start, {name: values.take(rows, axis=0) for name, values in row_group.items()}
        )


def _assemble(
    lanes: list[_LaneBuffer], lane_of_row: npt.NDArray[np.int64], columns: Sequence[Column]
) -> Batch:
    """Takes the rows of a block from the lanes and puts them into the order of positions."""
    num_rows = len(lane_of_row)
    counts = np.bincount(lane_of_row, minlength=len(lanes)).tolist()
    parts = [part for lane, count in zip(lanes, counts, strict=True) for part in lane.take(count)]
    block = {}
    by_lane = np.argsort(lane_of_row.astype(np.int16), kind="stable")
    source = np.empty(num_rows, dtype=np.int64)
    source[by_lane] = np.arange(num_rows)
    for column in columns:
        if not parts:
            block[column.name] = np.zeros((0, *column.row_shape), dtype=column.dtype)
            continue
        joined = np.concatenate([part[column.name] for part in parts])
        block[column.name] = joined if len(lanes) == 1 else joined.take(source, axis=0)
    return block
