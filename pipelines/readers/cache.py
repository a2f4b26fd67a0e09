"""Keeps decoded row groups after the first epoch, in memory or in memory-mapped local files.

Every epoch reads every row group once, so nothing is evicted: what fits stays,
and the rest is read again. Nobody writes to a row group from the cache, because
the shuffle takes copies.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np

from ringspark.pipelines.rows import NumpyArray, RaggedRows, Rows, num_bytes

RowGroup = dict[str, Rows]


class RowGroupCache(ABC):
    """Row groups by index, up to a given number of bytes."""

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 1:
            raise ValueError(f"cache_bytes must be at least 1, got {max_bytes}")
        self.max_bytes = max_bytes
        self.num_bytes = 0

    @abstractmethod
    def __contains__(self, index: int) -> bool:
        """Whether the cache holds the row group."""

    @abstractmethod
    def get(self, index: int) -> RowGroup:
        """Returns a row group that the cache holds."""

    def put(self, index: int, row_group: RowGroup) -> None:
        """Keeps a row group if it fits."""
        size = sum(num_bytes(rows) for rows in row_group.values())
        if index not in self and self.num_bytes + size <= self.max_bytes:
            self.num_bytes += size
            self._keep(index, row_group)

    @abstractmethod
    def _keep(self, index: int, row_group: RowGroup) -> None: ...


class MemoryCache(RowGroupCache):
    """Cache "memory"."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self._row_groups: dict[int, RowGroup] = {}

    def __contains__(self, index: int) -> bool:
        return index in self._row_groups

    def get(self, index: int) -> RowGroup:
        return self._row_groups[index]

    def _keep(self, index: int, row_group: RowGroup) -> None:
        self._row_groups[index] = row_group


class DiskCache(RowGroupCache):
    """Cache "disk": uncompressed files in a temporary folder, mapped on use and removed at the end."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self._folder = Path(tempfile.mkdtemp(prefix="ringspark-cache-"))
        self._row_groups: dict[int, dict[str, int]] = {}  # column name -> number of its parts, 0 if dense
        self._remove = weakref.finalize(self, _remove, self._folder, os.getpid())

    def __contains__(self, index: int) -> bool:
        return index in self._row_groups

    def get(self, index: int) -> RowGroup:
        return {
            name: self._load(index, column, parts)
            for column, (name, parts) in enumerate(self._row_groups[index].items())
        }

    def _keep(self, index: int, row_group: RowGroup) -> None:
        arrays = {}
        for column, (name, rows) in enumerate(row_group.items()):
            if isinstance(rows, RaggedRows):
                compact = rows.compact()
                self._save(index, column, [compact.offsets, *compact.parts])
                arrays[name] = len(compact.parts)
            else:
                self._save(index, column, [rows])
                arrays[name] = 0
        self._row_groups[index] = arrays

    def _save(self, index: int, column: int, arrays: list[NumpyArray]) -> None:
        for number, array in enumerate(arrays):
            np.save(self._path(index, column, number), array, allow_pickle=False)

    def _load(self, index: int, column: int, parts: int) -> Rows:
        def mapped(number: int) -> NumpyArray:
            path = self._path(index, column, number)
            try:
                array: NumpyArray = np.load(path, mmap_mode="r", allow_pickle=False)
            except ValueError:  # an empty array cannot be mapped
                array = np.load(path, allow_pickle=False)
            return array

        if not parts:
            return mapped(0)
        return RaggedRows(mapped(0), tuple(mapped(number) for number in range(1, parts + 1)))

    def _path(self, index: int, column: int, number: int) -> Path:
        return self._folder / f"{index}-{column}-{number}.npy"


def _remove(folder: Path, owner: int) -> None:
    # A forked child inherits the cache and may end earlier; it must not remove the folder.
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


CACHES: dict[str, type[RowGroupCache]] = {"memory": MemoryCache, "disk": DiskCache}
