"""Makes batches from row groups: the code that all readers share.

An engine yields row groups as Arrow tables, and this module makes the batches of `plan_epoch` from them, so
all engines return the same bytes. The batches of many steps (a block) are built at once, because one large
gather is several times as fast as many small ones. Reading and building each run ahead in a thread.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ringspark.pipelines import storage
from ringspark.pipelines.columns import Column
from ringspark.pipelines.epoch_plan import EpochPlan, ShardPlan, plan_epoch
from ringspark.pipelines.kinds.base import one_chunk
from ringspark.pipelines.manifest import ShardManifest
from ringspark.pipelines.readers.blocks import (
    RowGroup,
    StreamBuffer,
    StreamRows,
    assemble,
    pack,
    plan_packs,
    unpack,
)
from ringspark.pipelines.readers.cache import RowGroupCache
from ringspark.pipelines.readers.prefetch import prefetch, prefetch_bundles
from ringspark.pipelines.readers.range_file import Tails, open_ranges
from ringspark.pipelines.readers.retry import Retries
from ringspark.pipelines.rows import cut
from ringspark.pipelines.table_files import FILE, ROW, TABLE_REMEDY, Window, in_place

Batch = dict[str, npt.NDArray[Any]]

# A block is built at once, column by column. It is so large that the cost of NumPy calls does not count (half
# the rows take a tenth more time), and small next to the row groups.
_BLOCK_ROWS = 98_304
_BLOCK_COLUMN_BYTES = 3 << 20
_BLOCK_BYTES = 8 << 20
_PREFETCHED_BLOCKS = 2
_PREFETCHED_TABLES = 2
# External tables may have tiny row groups, which pass from thread to thread in bundles.
_BUNDLE_BYTES = 256 << 10


class ShardReader(ABC):
    """Reads the batches of one shard, in any epoch. `open_reader` creates it; each engine is a subclass.

    Attributes:
        manifest: The files to read. All of them are read, so `select` a split first.
        batch_size: Rows per step over all shards, or a function that returns this number for an epoch.
        shuffle: False keeps the order of the files.
        cache: Cache of row groups; None reads them again in every epoch.
    """

    engine: ClassVar[str]
    reads_ahead: ClassVar[bool] = False
    """Whether the engine itself reads ahead in a thread."""

    def __init__(
        self,
        manifest: ShardManifest,
        columns: Sequence[str] | None = None,
        shard: int = 0,
        num_shards: int = 1,
        batch_size: int | Callable[[int], int] = 1024,
        seed: int = 0,
        shuffle: bool = True,
        cache: RowGroupCache | None = None,
    ) -> None:
        if isinstance(columns, str) or (columns is not None and not columns):
            raise ValueError(f"columns must be a list of at least one column name, got {columns!r}")
        names = (
            [column.name for column in manifest.columns] if columns is None else list(dict.fromkeys(columns))
        )
        self.manifest = replace(manifest, uri=storage.normalize(manifest.uri))
        self.columns: tuple[Column, ...] = tuple(manifest.column(name) for name in names)
        self.shard = shard
        self.num_shards = num_shards
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.cache = cache
        self._kinds = {column.name: column.kind for column in self.columns}
        self._packs = plan_packs(self._kinds)
        self._checked_files: set[str] = set()
        self._row_groups = manifest.row_groups
        self._located = manifest.locate()
        self._windows: dict[str, tuple[Window, ...]] = {}
        tables = [file.table for file in manifest.files if file.table is not None]
        self._folder_values = set(tables[0].values) if tables else set()
        self.plan(0).shard(shard)  # refuses numbers out of range before the first epoch

    @property
    def num_steps(self) -> int:
        """Number of steps per epoch. If the batch size depends on the epoch: steps of the first epoch."""
        return self.plan(0).num_steps

    def plan(self, epoch: int) -> EpochPlan:
        return plan_epoch(
            self._row_groups,
            num_shards=self.num_shards,
            batch_size=self.batch_size(epoch) if callable(self.batch_size) else self.batch_size,
            epoch=epoch,
            seed=self.seed,
            shuffle=self.shuffle,
        )

    def close(self) -> None:
        """Releases the reader's memory. The reader cannot be used afterwards."""
        if self.cache is not None:
            self.cache.close()
        self.cache = None

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """Yields the shard's batches of an epoch, one per step from `start_step` on. A thread reads ahead.

        Yields:
            Dict of arrays by name, each of shape (rows, ...). The caller may write to them. Ragged and sparse
            columns have several arrays; see their column types. The number of rows differs by a few between
            steps and may be 0.

        Raises:
            RuntimeError: A row group cannot be read; the message names the file and the row group.
        """
        plan = self.plan(epoch)
        if not 0 <= start_step <= plan.num_steps:
            raise ValueError(f"start_step must be from 0 to {plan.num_steps}, got {start_step}")
        # Separate, so that a wrong step is refused by this call and not by the first `next`.
        return self._batches(plan.shard(self.shard), start_step)

    @abstractmethod
    def read_tables(self, indexes: Sequence[int]) -> Iterator[Any]:
        """Yields the row groups with these indexes as Arrow tables, in exactly this order.

        Indexes count over all files of the manifest, and may repeat. A table has at least the columns
        `stored_names`. If a row group cannot be read, the engine raises its error at this row group.
        """

    @property
    def stored_names(self) -> list[str]:
        if self.manifest.table is not None:
            return [column.name for column in self.columns if column.name not in self._folder_values]
        referenced = self.manifest.file_columns or {}
        stored = [c for c in self.columns if c.name not in referenced]
        names = [FILE, ROW] if len(stored) < len(self.columns) else []
        return names + [name for column in stored for name in column.kind.stored(column.name)]

    def read_row_groups(self, indexes: Sequence[int]) -> Iterator[RowGroup]:
        """Yields the columns of row groups, in the order of `indexes`.

        Takes them from the cache if possible.
        """
        cached = set() if self.cache is None else {index for index in indexes if index in self.cache}
        missing = [index for index in indexes if index not in cached]
        with ExitStack() as stack:
            tables = self._tables(missing)
            if missing and not self.reads_ahead:
                rows = _BUNDLE_BYTES // sum(self._widths())
                tables = prefetch_bundles(tables, _PREFETCHED_TABLES, lambda table: table.num_rows, rows)
            stack.enter_context(closing(tables))
            for index in indexes:
                if index in cached:
                    assert self.cache is not None
                    yield self.cache.get(index)
                    continue
                row_group = self._decode(index, next(tables))
                if self.cache is not None:
                    self.cache.put(index, row_group)
                yield row_group

    def locate(self, index: int) -> tuple[str, int]:
        """Returns the URI of the file that holds a row group, and the row group's number in the file."""
        file, group = self._located[index]
        window = self.window(index)
        return storage.join(self.manifest.files_uri, file.path), group if window is None else window.row_group

    def window(self, index: int) -> Window | None:
        """Returns the window of an external table that an index stands for; None for shards."""
        file, group = self._located[index]
        if file.table is None:
            return None
        if file.path not in self._windows:
            self._windows[file.path] = file.table.windows(file.row_groups)
        return self._windows[file.path][group]

    def read_error(self, index: int, error: BaseException, attempts: int = 1) -> RuntimeError:
        uri, row_group = self.locate(index)
        tried = f" after {attempts} attempts" if attempts > 1 else ""
        if attempts > 1:
            remedy = "check the connection to the store and resume"
        elif isinstance(error, PermissionError):
            remedy = "check the credentials of this process and their permissions"
        elif self.manifest.table is not None or self.manifest.file_columns is not None:
            remedy = TABLE_REMEDY
        elif isinstance(error, FileNotFoundError):
            remedy = "load the manifest again if the shards were replaced, otherwise write them again"
        else:
            remedy = "if the file is damaged, write the shards again"
        return RuntimeError(
            f"reading row group {row_group} of {os.fspath(uri)!r} failed{tried} "
            f"({type(error).__name__}: {error}); {remedy}"
        )

    def _tables(self, indexes: Sequence[int]) -> Generator[Any, None, None]:
        """Yields row groups as tables; reads again after a temporary failure of the store."""
        done, retries = 0, Retries()
        while done < len(indexes):
            try:
                self._check_file(indexes[done])
                with (
                    closing(self.read_tables(indexes[done:])) as tables,  # type: ignore[type-var]
                    self._new_rows() as referenced,
                ):
                    for table in tables:
                        if table.num_rows != (rows := self._row_groups[indexes[done]]):
                            raise ValueError(f"it has {table.num_rows} rows, but the manifest says {rows}")
                        if referenced is not None:
                            table = referenced.resolve(table)
                            if done == len(indexes) - 1:
                                referenced.check()  # before the last table, because no call follows it
                        yield table
                        done += 1
                        retries.attempts = 1  # a long epoch may have many interruptions
                        if done < len(indexes):
                            self._check_file(indexes[done])
            except Exception as error:
                uri, _ = self.locate(indexes[done])
                if not retries.again(uri, error):
                    raise self.read_error(indexes[done], error, retries.attempts) from error

    def _new_rows(self) -> AbstractContextManager[Any]:
        """Returns a context with the reader of referenced rows, or with None if the shards hold the rows."""
        if not self.manifest.file_columns:
            return nullcontext()
        kind = in_place("referenced_rows").ReferencedRows
        return closing(kind(self.columns, self.manifest.file_columns, partial(open_ranges, tails=Tails())))

    def _check_file(self, index: int) -> None:
        file, _ = self._located[index]
        if file.table is not None or file.path in self._checked_files:
            return  # ArrowReader compares more of an external table, and more often
        num_bytes = storage.size(storage.join(self.manifest.files_uri, file.path))
        if num_bytes != file.num_bytes:
            raise ValueError(f"it has {num_bytes} bytes, but the manifest says {file.num_bytes}")
        self._checked_files.add(file.path)

    def _decode(self, index: int, table: Any) -> RowGroup:
        row_group: RowGroup = {}
        for name, kind in self._kinds.items():
            try:
                if name in self._folder_values:
                    external = self._located[index][0].table
                    assert external is not None
                    dtype = kind.arrays(name)[name].dtype
                    row_group[name] = np.full(self._row_groups[index], external.values[name], dtype=dtype)
                elif self.manifest.table is not None:
                    row_group[name] = in_place("referenced_rows").decode_column(
                        one_chunk(table.column(name)), kind
                    )
                else:
                    stored = [one_chunk(table.column(part)) for part in kind.stored(name)]
                    row_group[name] = kind.decode(stored)
            except (ValueError, KeyError, pa.ArrowException) as error:
                raise self.read_error(index, ValueError(f"column {name!r} {error}")) from error
        return row_group

    def _batches(self, plan: ShardPlan, start_step: int) -> Iterator[Batch]:
        with closing(prefetch(self._blocks(plan, start_step), _PREFETCHED_BLOCKS)) as blocks:
            for block in blocks:
                yield from block

    def _blocks(self, plan: ShardPlan, start_step: int) -> Iterator[list[Batch]]:
        reads = plan.reads(start_step)
        streams, cycle = [StreamBuffer() for _ in plan.deal.streams], plan.deal.stream_cycle
        waiting = deque(reads.first_steps.tolist())
        num_steps = plan.plan.num_steps
        steps = block_steps(self._widths(), self.num_shards, plan.plan.batch_size)
        empty = {
            name: kind.decode([pa.array([], data_type) for data_type in kind.stored(name).values()])
            for name, kind in self._kinds.items()
        }
        with closing(self.read_row_groups(reads.row_groups.tolist())) as row_groups:  # type: ignore[type-var]
            needed = zip(reads, row_groups, strict=True)
            for first in range(start_step, num_steps, steps):
                last = min(first + steps, num_steps)
                while waiting and waiting[0] < last:
                    waiting.popleft()
                    read, row_group = next(needed)
                    packed = pack(row_group, self._packs)
                    for place, rows in zip(read.slices, plan.rows(read), strict=True):
                        streams[place.stream].add(place.start, StreamRows(packed, rows))
                bounds = plan.bounds(first, last)
                block = assemble(streams, cycle, bounds[0], bounds[-1], pack(empty, self._packs))
                yield [
                    self._finish(block, start - bounds[0], stop - bounds[0])
                    for start, stop in pairwise(bounds)
                ]

    def _finish(self, block: RowGroup, start: int, stop: int) -> Batch:
        batch: Batch = {}
        rows = unpack({name: cut(column, start, stop) for name, column in block.items()}, self._packs)
        for name, kind in self._kinds.items():
            batch.update(kind.finish(name, rows[name]))
        return batch

    def _widths(self) -> list[int]:
        return [max(1, math.ceil(self.manifest.mean_row_bytes(column))) for column in self.columns]


def block_steps(widths: Sequence[int], num_shards: int, batch_size: int) -> int:
    rows = min(_BLOCK_ROWS, _BLOCK_COLUMN_BYTES // max(widths), num_shards * _BLOCK_BYTES // sum(widths))
    return max(1, rows // batch_size)
