"""Keeps decoded row groups after the first epoch, in memory or in a memory-mapped local file.

Every epoch reads every row group once, so nothing is evicted: what fits stays,
and the rest is read again. Nobody writes to a row group from the cache, because
the shuffle takes copies.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection
from math import prod
from typing import Any, cast

import numpy as np

from ringspark.pipelines.rows import NumpyArray, RaggedRows, Rows, num_bytes

RowGroup = dict[str, Rows]

# Offset in the file, dtype and shape of an array.
_Place = tuple[int, np.dtype[Any], tuple[int, ...]]

_ALIGNMENT = 64


class RowGroupCache(ABC):
    """Row groups by index, up to a given number of bytes.

    Attributes:
        max_bytes: The most bytes to hold.
        keep: The row groups worth keeping; None for all.
        num_bytes: Bytes held.
    """

    def __init__(self, max_bytes: int, keep: Collection[int] | None = None) -> None:
        if max_bytes < 1:
            raise ValueError(f"cache_bytes must be at least 1, got {max_bytes}")
        self.max_bytes = max_bytes
        self.keep = keep
        self.num_bytes = 0

    @abstractmethod
    def __contains__(self, index: int) -> bool:
        """Whether the cache holds the row group."""

    @abstractmethod
    def get(self, index: int) -> RowGroup:
        """Returns a row group that the cache holds."""

    def put(self, index: int, row_group: RowGroup) -> None:
        """Keeps a row group if it fits."""
        if index in self or (self.keep is not None and index not in self.keep):
            return
        size = sum(num_bytes(rows) for rows in row_group.values())
        if self.num_bytes + size <= self.max_bytes:
            self.num_bytes += size
            self._keep(index, row_group)

    @abstractmethod
    def close(self) -> None:
        """Frees what it holds; it is not used any more."""

    @abstractmethod
    def _keep(self, index: int, row_group: RowGroup) -> None: ...


class MemoryCache(RowGroupCache):
    """Cache "memory"."""

    def __init__(self, max_bytes: int, keep: Collection[int] | None = None) -> None:
        super().__init__(max_bytes, keep)
        self._row_groups: dict[int, RowGroup] = {}

    def __contains__(self, index: int) -> bool:
        return index in self._row_groups

    def get(self, index: int) -> RowGroup:
        return self._row_groups[index]

    def close(self) -> None:
        self._row_groups.clear()

    def _keep(self, index: int, row_group: RowGroup) -> None:
        self._row_groups[index] = row_group


class DiskCache(RowGroupCache):
    """Cache "disk": one uncompressed temporary file, whose parts are mapped on use.

    The file has no name, so the kernel removes it with the process that made it, however that ends.
    """

    def __init__(self, max_bytes: int, keep: Collection[int] | None = None) -> None:
        super().__init__(max_bytes, keep)
        with tempfile.TemporaryFile(prefix="ringspark-cache-") as file:
            self.fd = os.dup(file.fileno())
        self._close = weakref.finalize(self, os.close, self.fd)
        self._end = 0
        self._row_groups: dict[int, dict[str, list[_Place]]] = {}

    def __contains__(self, index: int) -> bool:
        return index in self._row_groups

    def get(self, index: int) -> RowGroup:
        row_group: RowGroup = {}
        for name, places in self._row_groups[index].items():
            first, *parts = map(self._mapped, places)
            row_group[name] = RaggedRows(first, tuple(parts)) if parts else first
        return row_group

    def close(self) -> None:
        self._row_groups.clear()
        self._close()

    def _keep(self, index: int, row_group: RowGroup) -> None:
        kept = {}
        for name, rows in row_group.items():
            ragged = rows.compact() if isinstance(rows, RaggedRows) else None
            arrays = [cast("NumpyArray", rows)] if ragged is None else [ragged.offsets, *ragged.parts]
            kept[name] = [self._append(np.ascontiguousarray(array)) for array in arrays]
        self._row_groups[index] = kept

    def _append(self, array: NumpyArray) -> _Place:
        place = (self._end, array.dtype, array.shape)
        data = memoryview(cast("Any", array.reshape(-1).view(np.uint8)))
        while data:
            written = os.pwrite(self.fd, data, self._end)
            self._end, data = self._end + written, data[written:]
        self._end += -self._end % _ALIGNMENT
        return place

    def _mapped(self, place: _Place) -> NumpyArray:
        offset, dtype, shape = place
        if not prod(shape):  # nothing cannot be mapped
            return np.zeros(shape, dtype)
        begin = offset - offset % mmap.ALLOCATIONGRANULARITY
        length = offset - begin + dtype.itemsize * prod(shape)
        mapped = mmap.mmap(self.fd, length, offset=begin, access=mmap.ACCESS_READ)
        return np.frombuffer(mapped, dtype, prod(shape), offset - begin).reshape(shape)


CACHES: dict[str, type[RowGroupCache]] = {"memory": MemoryCache, "disk": DiskCache}
