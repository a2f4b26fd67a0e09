"""Reads row groups with pyarrow."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

import pyarrow.parquet as pq

from ringspark.pipelines import storage
from ringspark.pipelines.manifest import row_group_problem
from ringspark.pipelines.readers.base import ShardReader
from ringspark.pipelines.readers.range_file import Tails, open_ranges
from ringspark.pipelines.table_files import FILE, changed_problem, in_place

# The streams of a shuffled epoch alternate between many files, and opening a file takes about a millisecond.
_OPEN_FILES = 64


class ArrowReader(ShardReader):
    """Engine "arrow"."""

    engine: ClassVar[str] = "arrow"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tails = Tails()
        self._table_states = {
            storage.join(self.manifest.files_uri, file.path): (file.num_bytes, file.state)
            for file in self.manifest.files
            if file.table is not None
        }

    def read_tables(self, indexes: Sequence[int]) -> Iterator[Any]:
        names = self.stored_names
        kept = None if self.manifest.table is None else in_place("row_pages").KeptPages()
        files: OrderedDict[str, tuple[Any, Any, ExitStack]] = OrderedDict()
        try:
            for number, index in enumerate(indexes):
                uri, row_group = self.locate(index)
                if uri in files:
                    files.move_to_end(uri)
                else:
                    if len(files) >= _OPEN_FILES:
                        closed, (_, _, stack) = files.popitem(last=False)
                        stack.close()
                        self._check_unchanged([closed])
                    files[uri] = self._open(index, kept)
                file, pages, _ = files[uri]
                window = self.window(index)
                file_rows = self._located[index][0].row_groups
                if window is None or window.stop - window.start == file_rows[row_group]:
                    table = file.read_row_group(row_group, columns=names, use_threads=False)
                else:
                    table = pages.read(row_group, names, window.start, window.stop)
                if number == len(indexes) - 1:
                    self._check_unchanged(files)  # before the last table, because no call follows it
                yield table
        finally:
            for _, _, stack in files.values():
                stack.close()

    def _check_unchanged(self, uris: Iterable[str]) -> None:
        known = [(uri, *self._table_states[uri]) for uri in uris if uri in self._table_states]
        if (problem := changed_problem(known)) is not None:
            raise ValueError(problem)

    def _open(self, index: int, kept: Any) -> tuple[Any, Any, ExitStack]:
        """Returns a row group's Parquet file, a page reader (cache: `kept`), and a stack to close both."""
        (uri, _), (shard_file, _) = self.locate(index), self._located[index]
        self._check_unchanged([uri])
        with ExitStack() as stack:
            source = stack.enter_context(open_ranges(uri, shard_file.num_bytes, self._tails))
            file = pq.ParquetFile(
                source,
                # In a store, one request fetches all adjacent columns of a row group.
                pre_buffer=not storage.is_local(uri),
                coerce_int96_timestamp_unit="us",
                # The same text in most rows takes longer to copy than to read a row that it names.
                read_dictionary=None if self.manifest.file_columns is None else [FILE],
            )
            problem = row_group_problem(shard_file, file.metadata)
            if problem is not None:
                raise ValueError(f"it {problem}")
            pages = None
            if kept is not None:
                pages = in_place("row_pages").PageReader(source, file.metadata, kept, uri)
            return file, pages, stack.pop_all()
