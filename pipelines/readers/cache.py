"""Keeps decoded row groups after the first epoch, in memory or in a memory-mapped local file.

Every epoch reads every row group once, so nothing is evicted. Row groups that do not fit are read again.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import numpy as np

from ringspark.pipelines.rows import NumpyArray, RaggedRows, Rows, num_bytes

RowGroup = dict[str, Rows]

_ALIGNMENT = 64
# Python keeps a descriptor per mapping, and a process has about a thousand. A block needs many row groups at
# once if they are small, and reading them costs no more than mapping them.
_MAPPED_BYTES = 256 << 10

_logger = logging.getLogger(__name__)


class _StoredArray(NamedTuple):
    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class _StoredRowGroup(NamedTuple):
    offset: int
    num_bytes: int
    columns: dict[str, list[_StoredArray]]


class RowGroupCache:
    """Cache "memory", and base class of the other caches.

    `keep` lists the indexes of the row groups to cache; None caches all.
    """

    def __init__(self, max_bytes: int, keep: Collection[int] | None = None) -> None:
        if max_bytes < 1:
            raise ValueError(f"cache_bytes must be at least 1, got {max_bytes}")
        self.max_bytes = max_bytes
        self.keep = keep
        self.num_bytes = 0
        self._row_groups: dict[int, Any] = {}

    def __contains__(self, index: int) -> bool:
        return index in self._row_groups

    def get(self, index: int) -> RowGroup:
        row_group: RowGroup = self._row_groups[index]
        return row_group

    def put(self, index: int, row_group: RowGroup) -> None:
        if index in self or (self.keep is not None and index not in self.keep):
            return
        size = sum(num_bytes(rows) for rows in row_group.values())
        if self.num_bytes + size <= self.max_bytes and self._keep(index, row_group):
            self.num_bytes += size

    def close(self) -> None:
        """Releases the row groups. The cache must not be used afterwards."""
        self._row_groups.clear()

    def _keep(self, index: int, row_group: RowGroup) -> bool:
        """Stores a row group; returns whether it could be stored."""
        self._row_groups[index] = row_group
        return True


class DiskCache(RowGroupCache):
    """Cache "disk": one temporary file. Large row groups are memory-mapped at use, and small ones are read.

    The file has no name, so the kernel removes it when the process ends. Several threads may use the cache. A
    forked child only reads, because its parent would write to the same places in the file.
    """

    def __init__(self, max_bytes: int, keep: Collection[int] | None = None) -> None:
        super().__init__(max_bytes, keep)
        with tempfile.TemporaryFile(prefix="ringspark-cache-") as file:
            self.fd = os.dup(file.fileno())
        self._close = weakref.finalize(self, os.close, self.fd)
        self._lock, self._pid = threading.Lock(), os.getpid()
        self._end = 0

    def get(self, index: int) -> RowGroup:
        with self._alone():
            place = self._row_groups[index]
            data = self._data(place)
        row_group: RowGroup = {}
        for name, arrays in place.columns.items():
            first, *parts = (np.ndarray(shape, dtype, data, offset) for offset, dtype, shape in arrays)
            row_group[name] = RaggedRows(first, tuple(parts)) if parts else first
        return row_group

    def put(self, index: int, row_group: RowGroup) -> None:
        if os.getpid() == self._pid:
            with self._alone():
                super().put(index, row_group)

    def close(self) -> None:
        with self._alone():
            # The kernel reuses the descriptor for the next open file, so nobody may use it from here on.
            self.fd, self.keep = -1, ()
            self._row_groups.clear()
            self._close()

    def _alone(self) -> AbstractContextManager[Any]:
        """Returns the lock against other threads.

        A forked child takes no lock, because a thread that does not exist in the child may hold it.
        """
        return self._lock if os.getpid() == self._pid else nullcontext()

    def _keep(self, index: int, row_group: RowGroup) -> bool:
        offset = end = self._end
        columns: dict[str, list[_StoredArray]] = {}
        try:
            for name, rows in row_group.items():
                ragged = rows.compact() if isinstance(rows, RaggedRows) else None
                arrays = [cast("NumpyArray", rows)] if ragged is None else [ragged.offsets, *ragged.parts]
                columns[name] = []
                for array in arrays:
                    end += -end % _ALIGNMENT if array.nbytes else 0
                    columns[name].append(_StoredArray(end - offset, array.dtype, array.shape))
                    data = memoryview(cast("Any", np.ascontiguousarray(array).reshape(-1).view(np.uint8)))
                    while data:
                        written = os.pwrite(self.fd, data, end)
                        end, data = end + written, data[written:]
        except OSError as error:
            self.keep = ()
            _logger.warning(
                "cache 'disk' keeps only %d row groups, and the others are read again in every epoch: %s",
                len(self._row_groups), error,
            )  # fmt: skip
            return False
        self._row_groups[index] = _StoredRowGroup(offset, end - offset, columns)
        self._end = end + -end % _ALIGNMENT
        return True

    def _data(self, place: _StoredRowGroup) -> Any:
        if place.num_bytes < _MAPPED_BYTES:
            return os.pread(self.fd, place.num_bytes, place.offset)
        skipped = place.offset % mmap.ALLOCATIONGRANULARITY
        begin, length = place.offset - skipped, skipped + place.num_bytes
        return memoryview(mmap.mmap(self.fd, length, offset=begin, access=mmap.ACCESS_READ))[skipped:]


CACHES: dict[str, type[RowGroupCache]] = {"memory": RowGroupCache, "disk": DiskCache}
