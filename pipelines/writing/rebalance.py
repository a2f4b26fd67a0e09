"""After a write, copies the rows of files of uneven size into files of even size.

The write makes one file per partition and split, without a shuffle. If the partitions are skewed, or
many and tiny, the rows are then copied from the shards. The DataFrame's plan is not computed again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from ringspark.pipelines import storage
from ringspark.pipelines.kinds.base import one_chunk
from ringspark.pipelines.manifest import ShardFile, Split
from ringspark.pipelines.writing.shard_writer import WritePlan

# The largest file may hold this many times the rows of the average file.
MAX_SKEW = 1.5
# Files are merged if there are more per core, and they are smaller, than this.
FILES_PER_CORE = 4
SMALL_FILE_BYTES = 32 << 20


class RowRange(NamedTuple):
    path: str
    start: int
    stop: int


def plan_even_files(
    files: Sequence[ShardFile], num_files: int | None, num_bytes: int, cores: Callable[[], int]
) -> list[list[RowRange]]:
    """Returns the rows of each new file of one split, in order; empty if the files are even already.

    `num_bytes` is the size of all rows before compression.
    """
    sizes = [file.num_rows for file in files]
    rows = sum(sizes)
    if not files:
        return []
    wanted = len(sizes) if num_files is None else min(num_files, rows)
    if num_files is None and len(sizes) > FILES_PER_CORE and num_bytes / len(sizes) < SMALL_FILE_BYTES:
        wanted = min(wanted, max(FILES_PER_CORE * cores(), num_bytes // SMALL_FILE_BYTES))
    if wanted == len(sizes) and max(sizes) <= max(MAX_SKEW * rows / wanted, 1):
        return []
    bounds = [rows * number // wanted for number in range(wanted + 1)]
    return [
        [RowRange(files[index].path, low, high) for index, low, high in _split(sizes, start, stop)]
        for start, stop in pairwise(bounds)
    ]


def copy_files(
    plan: WritePlan, split: Split, files: Sequence[Sequence[RowRange]], batches: Iterator[Any]
) -> Iterator[Any]:
    """Copies the rows `files[i]` to new file i, for each i in `batches`; yields manifest entries as JSON."""
    for batch in batches:
        for number in batch.column(0).to_pylist():
            entry = _copy(plan, split, number, files[number])
            report = json.dumps({"number": number, **vars(entry)}, default=vars)
            yield pa.RecordBatch.from_pydict({"report": [report]})


def _split(sizes: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yields (index, start row, stop row) within each entry of `sizes` that overlaps `start` to `stop`."""
    first = 0
    for index, size in enumerate(sizes):
        low, high = max(start, first), min(stop, first + size)
        if low < high:
            yield index, low - first, high - first
        first += size


def _copy(plan: WritePlan, split: Split, number: int, ranges: Sequence[RowRange]) -> ShardFile:
    writer = plan.new_file(number, split)
    try:
        for path, start, stop in ranges:
            with storage.open_file(storage.join(plan.uri, path)) as source:
                file = pq.ParquetFile(source)
                sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
                for group, low, high in _split(sizes, start, stop):
                    table = file.read_row_group(group, use_threads=False).slice(low, high - low)
                    writer.add([_restore(table.column(name), t) for name, t in plan.stored_types.items()])
        entry = writer.finish(split)
    except BaseException:
        writer.discard()
        raise
    assert entry is not None, "a new file always has rows"
    return entry


def _restore(column: Any, stored_type: Any) -> Any:
    """Casts a column back to its written type, because Parquet renames the elements of lists."""
    array = one_chunk(column)
    is_same = array.type == stored_type or pa.types.is_fixed_size_binary(array.type)
    return array if is_same else array.cast(stored_type)
