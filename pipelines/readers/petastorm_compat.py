"""Replacements for removed functions, so that Petastorm runs with current pyarrow and NumPy.

Petastorm 0.12 and 0.13 need parts of pyarrow that versions 15 and 16 removed (`pyarrow.filesystem`,
`pyarrow.hdfs`, the legacy Parquet dataset) and two names that NumPy 2 removed. The replacements are put only
into Petastorm's modules, so other code is not affected. Other users of Petastorm keep pyarrow's dataset: it
is replaced only for the file system `Files`.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

# Names that Petastorm imports from the removed modules. The engine does not use their code.
_REMOVED = {"pyarrow.filesystem": "LocalFileSystem", "pyarrow.hdfs": "HadoopFileSystem"}
_USE_PARQUET = ("petastorm.reader", "petastorm.arrow_reader_worker", "petastorm.etl.dataset_metadata")

_import_lock = threading.Lock()


@contextmanager
def petastorm_importable() -> Iterator[None]:
    """Context in which Petastorm can be imported; patches the imported modules."""
    with _import_lock:
        missing = [name for name in _REMOVED if name not in sys.modules and find_spec(name) is None]
        try:
            for name in missing:
                sys.modules[name] = ModuleType(name)
                # A new class: nothing is an instance of it, even if other code imports it meanwhile.
                setattr(sys.modules[name], _REMOVED[name], type(_REMOVED[name], (), {}))
            yield
        finally:
            for name in missing:
                del sys.modules[name]
        for name in _USE_PARQUET:
            sys.modules[name].pq = _Parquet("pyarrow.parquet")  # type: ignore[attr-defined]
        # A pool of Petastorm 0.12 draws a seed, which would move the process's generator on.
        sys.modules["petastorm.workers_pool.thread_pool"].random = random.Random()  # type: ignore[attr-defined]
        if not hasattr(np, "unicode_"):
            sys.modules["petastorm.unischema"].np = _NumPy("numpy")  # type: ignore[attr-defined]


class Files:
    """File system that the engine passes to Petastorm: `openers` by path, or local files.

    Arrow opens local files, because Petastorm never closes a file, and Python would warn of that.
    """

    def __init__(self, openers: Mapping[str, Callable[[], Any]] | None = None) -> None:
        self.openers = openers

    def open(self, path: str) -> Any:
        return self.openers[path]() if self.openers else pa.OSFile(path)


class DatasetPiece:
    """The part of `pq.ParquetDatasetPiece` that Petastorm uses: a file, or one row group of it."""

    def __init__(
        self, path: str, open_file_func: Any, row_group: int | None = None, partition_keys: Sequence[Any] = ()
    ) -> None:
        self.path = path
        self.row_group = row_group
        self.partition_keys = partition_keys
        self._open = open_file_func

    def get_metadata(self) -> Any:
        return pq.ParquetFile(self._open(self.path)).metadata


class Dataset:
    """The part of the legacy `pq.ParquetDataset` that Petastorm uses, over exactly the given files."""

    # Without a summary file, Petastorm takes schema and row groups from the footers.
    metadata = common_metadata = None
    partitions = ()

    def __init__(self, paths: Sequence[str], files: Files) -> None:
        self.paths = paths
        self.fs = files
        self.pieces = [DatasetPiece(path, files.open) for path in paths]


class _Parquet(ModuleType):
    """Stands for `pyarrow.parquet` in Petastorm's modules."""

    def __getattr__(self, name: str) -> Any:
        return getattr(pq, name)

    @staticmethod
    def ParquetDataset(paths: Any, filesystem: Any = None, **options: Any) -> Any:  # noqa: N802
        if isinstance(filesystem, Files):
            return Dataset(paths, filesystem)
        return pq.ParquetDataset(paths, filesystem=filesystem, **options)

    @staticmethod
    def ParquetDatasetPiece(path: str, open_file_func: Any = None, **place: Any) -> Any:  # noqa: N802
        if isinstance(getattr(open_file_func, "__self__", None), Files):
            return DatasetPiece(path, open_file_func, **place)
        return pq.ParquetDatasetPiece(path, open_file_func=open_file_func, **place)


class _NumPy(ModuleType):
    """Stands for NumPy in Petastorm's schema module: NumPy 2 with the two removed names."""

    unicode_ = np.str_
    string_ = np.bytes_

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)
