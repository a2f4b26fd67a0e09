"""Reads row groups with pyarrow (any version from 14 on) and no other dependency."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from ringspark.pipelines import storage
from ringspark.pipelines.manifest import row_group_problem
from ringspark.pipelines.readers.base import ShardReader
from ringspark.pipelines.readers.prefetch import closed_check
from ringspark.pipelines.readers.range_file import RangeFile, Tails

# The lanes of a shuffled epoch take turns over many files; opening one costs about a millisecond.
_OPEN_FILES = 64


class ArrowReader(ShardReader):
    """Engine "arrow"."""

    engine: ClassVar[str] = "arrow"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tails = Tails()

    def read_tables(self, indexes: Sequence[int]) -> Iterator[Any]:
        """Yields the row groups in order, from files kept open while they are in use."""
        names = self.stored_names
        files: OrderedDict[str, tuple[Any, ExitStack]] = OrderedDict()
        try:
            for index in indexes:
                uri, row_group = self.locate(index)
                if uri in files:
                    files.move_to_end(uri)
                else:
                    if len(files) >= _OPEN_FILES:
                        files.popitem(last=False)[1][1].close()
                    files[uri] = self._open(index)
                yield files[uri][0].read_row_group(row_group, columns=names, use_threads=False)
        finally:
            for _, stack in files.values():
                stack.close()

    def _open(self, index: int) -> tuple[Any, ExitStack]:
        """Returns the Parquet file of a row group, and the stack that closes it."""
        uri, _ = self.locate(index)
        is_local = storage.is_local(uri)
        with ExitStack() as stack:
            source: Any = pa.OSFile(uri) if is_local else self._range_file(index)
            # In a store, one request fetches all columns of a row group that lie side by side.
            file = pq.ParquetFile(stack.enter_context(source), pre_buffer=not is_local)
            problem = row_group_problem(self._located[index][0], file.metadata)
            if problem is not None:
                raise ValueError(f"it {problem}")
            return file, stack.pop_all()

    def _range_file(self, index: int) -> RangeFile:
        file, _ = self._located[index]
        return RangeFile(self.locate(index)[0], file.num_bytes, self._tails, closed_check())
