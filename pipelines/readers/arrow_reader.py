"""Reads row groups with pyarrow alone: any pyarrow from 14 on, no other dependency."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from ringspark.pipelines import storage
from ringspark.pipelines.readers.base import ShardReader

# The lanes of a shuffled epoch take turns over many files; opening one costs about a millisecond.
_OPEN_FILES = 64


class ArrowReader(ShardReader):
    """Engine "arrow"."""

    engine: ClassVar[str] = "arrow"

    def read_tables(self, indexes: Sequence[int]) -> Iterator[Any]:
        """Yields the row groups in order, from files kept open while they are in use."""
        names = self.stored_names
        files: OrderedDict[str, tuple[Any, ExitStack]] = OrderedDict()
        try:
            for index in indexes:
                uri, row_group = self.locate(index)
                yield _opened(files, uri).read_row_group(row_group, columns=names, use_threads=False)
        finally:
            for _, stack in files.values():
                stack.close()


def _opened(files: OrderedDict[str, tuple[Any, ExitStack]], uri: str) -> Any:
    """Returns the open Parquet file, closing the one not used for longest when there are too many."""
    if uri in files:
        files.move_to_end(uri)
        return files[uri][0]
    if len(files) >= _OPEN_FILES:
        files.popitem(last=False)[1][1].close()
    with ExitStack() as stack:
        source = stack.enter_context(pa.memory_map(uri) if storage.is_local(uri) else storage.open_file(uri))
        file = pq.ParquetFile(source, pre_buffer=not storage.is_local(uri))
        files[uri] = (file, stack.pop_all())
    return file
