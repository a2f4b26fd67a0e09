"""Reads row groups with Petastorm: with its Reader, ventilator, thread pool and Arrow worker.

Three of Petastorm's hooks are overridden. Instead of choosing row groups itself, Petastorm reads the
requested ones, from the manifest's files only. Its worker and its results reader pass on Arrow tables
unchanged.
"""

from __future__ import annotations

import re
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import pyarrow.parquet as pq

from ringspark.pipelines import storage
from ringspark.pipelines.readers.base import ShardReader
from ringspark.pipelines.readers.petastorm_compat import Files, petastorm_importable
from ringspark.pipelines.readers.prefetch import Closed, closed_check
from ringspark.pipelines.readers.range_file import RangeFile, Tails
from ringspark.pipelines.readers.retry import may_pass

with petastorm_importable():
    from petastorm.arrow_reader_worker import ArrowReaderWorker
    from petastorm.reader import Reader
    from petastorm.workers_pool import EmptyResultError
    from petastorm.workers_pool.thread_pool import ThreadPool, WorkerTerminationRequested

# Number of row groups that Petastorm reads ahead.
_READ_AHEAD = 4


class PetastormReader(ShardReader):
    """Engine "petastorm"."""

    engine: ClassVar[str] = "petastorm"
    reads_ahead: ClassVar[bool] = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tails = Tails()

    def read_tables(self, indexes: Sequence[int]) -> Iterator[Any]:
        if not indexes:
            return
        try:
            reader = _OrderedReader(self, indexes)
        except Closed as closed:
            traceback.clear_frames(closed.__traceback__)
            raise
        except Exception as error:
            # The frames hold the pool that reads the footers, and would keep its threads alive.
            traceback.clear_frames(error.__traceback__)
            raise self._footer_error(error) from error
        try:
            for _ in indexes:
                yield next(reader)
        finally:
            reader.stop()
            reader.join()

    def opened_files(self) -> Files:
        uri = self.manifest.uri
        if storage.is_local(uri):
            return Files()
        is_closed, folder = closed_check(), storage.filesystem(uri)[1]
        return Files(
            {
                storage.join(folder, file.path): partial(
                    RangeFile, storage.join(uri, file.path), file.num_bytes, self._tails, is_closed
                )
                for file in self.manifest.files
            }
        )

    def _footer_error(self, error: Exception) -> Exception:
        """Returns an error that names the file, because Petastorm's errors about footers do not."""
        if not storage.is_local(self.manifest.uri) and may_pass(error):
            return error  # the store's error names the file, and checking all files would not help
        try:
            self.manifest.verify_files()
        except ValueError as problem:
            return problem
        return error


class _OrderedReader(Reader):  # type: ignore[misc]
    def __init__(self, reader: PetastormReader, indexes: Sequence[int]) -> None:
        located = [reader.locate(index) for index in indexes]
        paths = {uri: storage.filesystem(uri)[1] for uri, _ in located}
        self._wanted = [(paths[uri], row_group) for uri, row_group in located]
        files = sorted(paths.values())
        self._row_groups = {
            path: len(reader._located[index][0].row_groups)
            for (path, _), index in zip(self._wanted, indexes, strict=True)
        }
        super().__init__(
            reader.opened_files(),
            files,
            # Petastorm compares every regular expression with every column.
            schema_fields=[f"^(?:{'|'.join(map(re.escape, reader.stored_names))})$"],
            shuffle_row_groups=False,
            # With one worker, every version returns results in the order of the requests.
            reader_pool=ThreadPool(1, results_queue_size=_READ_AHEAD),
            num_epochs=1,
            worker_class=_TableWorker,
            is_batched_reader=True,
        )

    def _filter_row_groups(self, dataset: Any, row_groups: Any, *args: Any) -> tuple[list[int], None]:
        """Returns the requested row groups; replaces Petastorm's sharding."""
        counts = Counter(piece.path for piece in row_groups)
        for path, expected in self._row_groups.items():
            if counts[path] != expected:
                raise ValueError(f"{path!r} has {counts[path]} row groups, but the manifest says {expected}")
        index_of = {(piece.path, piece.row_group): index for index, piece in enumerate(row_groups)}
        return [index_of[wanted] for wanted in self._wanted], None


class _TableWorker(ArrowReaderWorker):  # type: ignore[misc]
    """Publishes each row group's Arrow table unchanged."""

    @staticmethod
    def new_results_queue_reader() -> _TableResults:
        return _TableResults()

    def process(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().process(*args, **kwargs)
        except WorkerTerminationRequested:
            raise
        except Closed:
            # The pool passes on only an Exception; without one its consumer would wait forever.
            self.publish_func(_ConsumerGone())
        except Exception as error:
            # The pool raises a published error in the consumer. An error that leaves this function would also
            # be printed to stderr.
            self.publish_func(error)

    def _read_with_shuffle_row_drop(self, piece: Any, pq_file: Any, column_names: Any, *args: Any) -> Any:
        if self._filesystem.openers:
            # Petastorm's own file would send one request per column to the store.
            source = self._filesystem.open(piece.path)
            pq_file = pq.ParquetFile(source, metadata=pq_file.metadata, pre_buffer=True)
        return pq_file.read_row_group(piece.row_group, columns=sorted(column_names), use_threads=False)


class _ConsumerGone(Exception):  # noqa: N818
    """Stands for `Closed` in Petastorm's pool, which passes on only subclasses of Exception."""


class _TableResults:
    batched_output = True

    def read_next(self, workers_pool: Any, schema: Any, ngram: Any) -> Any:
        try:
            return workers_pool.get_results()
        except _ConsumerGone:
            raise Closed from None
        except EmptyResultError:
            # Petastorm 0.13 first checks whether its workers are idle, then whether all work was handed out.
            # If the last row group is handed out between the two checks, it assumes the end and would drop
            # the row group. At the second call all work is out, and the answer is right.
            return workers_pool.get_results()
