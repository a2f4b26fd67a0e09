"""Makes even files from uneven ones after the write, without running the DataFrame's plan again.

Each task writes what its partition holds, without a shuffle. That keeps
`write_shards` near the speed of Spark's own writer, and files follow the input's
partitions. If these are skewed, or many and tiny, or the user asked for a number
of files, the rows are copied once more from the shards, in their order. So the
plan computes no row twice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ringspark.pipelines import storage
from ringspark.pipelines.manifest import ShardFile, Split
from ringspark.pipelines.writing.shard_writer import WritePlan

# The largest file may hold this many times the rows of the average file.
MAX_SKEW = 1.5
# Files are worth merging if there are more of them per core, and they are smaller, than this.
FILES_PER_CORE = 4
SMALL_FILE_BYTES = 32 << 20


@dataclass(frozen=True)
class Slice:
    """Rows `start` to `stop` of a file."""

    path: str
    start: int
    stop: int


@dataclass(frozen=True)
class NewFile:
    """One file to make from these slices, in this order."""

    split: Split
    slices: tuple[Slice, ...]


def even_files(files: Sequence[ShardFile], num_files: int | None, cores: Callable[[], int]) -> list[NewFile]:
    """Returns the files to make from the files of one split; none if they are even already.

    Args:
        files: The files of one split, in reading order.
        num_files: How many files are wanted; None lets their sizes decide.
        cores: Gives the number of cores; called only if files are many and small, as it takes a Spark job.
    """
    rows = sum(file.num_rows for file in files)
    if not files:
        return []
    wanted = len(files) if num_files is None else min(num_files, rows)
    if num_files is None and len(files) > FILES_PER_CORE:
        num_bytes = sum(file.num_bytes for file in files)
        if num_bytes / len(files) < SMALL_FILE_BYTES:
            wanted = min(wanted, max(FILES_PER_CORE * cores(), num_bytes // SMALL_FILE_BYTES))
    largest = max(file.num_rows for file in files)
    if wanted == len(files) and largest <= max(MAX_SKEW * rows / len(files), 1):
        return []
    bounds = [rows * number // wanted for number in range(wanted + 1)]
    return [NewFile(files[0].split, tuple(_slices(files, start, stop))) for start, stop in pairwise(bounds)]


def copy_files(plan: WritePlan, files: Sequence[NewFile], batches: Iterator[Any]) -> Iterator[Any]:
    """Makes the files whose numbers are in the batches, and yields their entries. Runs in a Spark task."""
    for batch in batches:
        for number in batch.column(0).to_pylist():
            entry = _copy(plan, number, files[number])
            yield pa.RecordBatch.from_pydict({"report": [json.dumps({"number": number, **entry.to_json()})]})


def _slices(files: Sequence[ShardFile], start: int, stop: int) -> Iterator[Slice]:
    """Cuts rows `start` to `stop`, counted over all files, into slices of single files."""
    first = 0
    for file in files:
        low, high = max(start, first), min(stop, first + file.num_rows)
        if low < high:
            yield Slice(file.path, low - first, high - first)
        first += file.num_rows


def _copy(plan: WritePlan, number: int, file: NewFile) -> ShardFile:
    writer = plan.new_file(number, file.split)
    stored = {
        name: kind for column in plan.stored_columns for name, kind in column.kind.stored(column.name).items()
    }
    try:
        for part in file.slices:
            for table in _read(storage.join(plan.uri, part.path), part):
                arrays = [_same(table.column(name), kind) for name, kind in stored.items()]
                writer.add(arrays)
        entry = writer.finish(file.split)
    except BaseException:
        writer.discard()
        raise
    assert entry is not None, "a new file always has rows"
    return entry


def _read(uri: str, part: Slice) -> Iterator[Any]:
    """Yields the rows of a slice, one row group at a time."""
    with storage.open_file(uri) as source:
        parquet = pq.ParquetFile(source)
        first = 0
        for group in range(parquet.num_row_groups):
            rows = parquet.metadata.row_group(group).num_rows
            low, high = max(part.start, first), min(part.stop, first + rows)
            if low < high:
                yield parquet.read_row_group(group, use_threads=False).slice(low - first, high - low)
            first += rows


def _same(column: Any, kind: Any) -> Any:
    """Returns a column as one array of its written type: Parquet renames the elements of lists."""
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks)
    same = array.type == kind or pa.types.is_fixed_size_binary(array.type)
    return array if same else array.cast(kind)
