"""Writes one Parquet file of a set of shards."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ringspark.pipelines import storage
from ringspark.pipelines.kinds.base import is_list, numbers, one_chunk
from ringspark.pipelines.manifest import ShardFile, Split
from ringspark.pipelines.spark_errors import report_task_errors
from ringspark.pipelines.table_files import NUM_BYTES, ROW

ROW_GROUP_BYTES = 4 << 20
"""Target size of a row group, in bytes.

A reader holds at most about 100 decoded row groups (see epoch_plan).
"""

MAX_ROW_GROUP_ROWS = 1 << 15
"""Largest number of rows of a row group, for narrow rows.

Larger row groups do not read faster, and would be harder to share evenly among many shards.
"""

# zstd shrinks random mantissas of floats by a tenth, and every read then takes eight times as long.
_LEAST_SAVED = 0.15
_SAMPLE_BYTES = 1 << 18


class ShardFileWriter:
    """Buffers record batches and writes them as row groups. Without rows, no file is created.

    If `row_group_rows` is None, a row group has about `ROW_GROUP_BYTES`. `value_bytes` counts the bytes of
    the added values, before compression.
    """

    def __init__(
        self,
        uri: str,
        path: str,
        stored_types: Mapping[str, Any],
        *,
        row_group_rows: int | None,
        compression: str,
    ) -> None:
        self._path = path
        self._uri = storage.join(uri, path)
        self._stored_types = stored_types
        self._schema: Any = None
        self._row_group_rows = row_group_rows
        self._compression = compression
        self._buffer: list[Any] = []
        self._buffered_rows = 0
        self._buffered_bytes = self.value_bytes = 0
        self._row_groups: list[int] = []
        self._file: _DigestFile | None = None
        self._parquet: Any = None

    def add(self, arrays: Sequence[Any]) -> None:
        """Adds rows, given as one Arrow array per stored column."""
        if self._schema is None:
            self._schema = _schema(self._stored_types, arrays)
        batch = pa.RecordBatch.from_arrays(list(arrays), schema=self._schema)
        if not batch.num_rows:
            return
        self._buffer.append(batch)
        self._buffered_rows += batch.num_rows
        if NUM_BYTES in self._stored_types:
            added = int(pc.sum(arrays[-1]).as_py())
        else:
            added = sum(map(num_bytes, arrays))
        self._buffered_bytes += added
        self.value_bytes += added
        if self._buffered_rows >= self._group_rows():
            with self._report_errors():
                self._flush(keep_remainder=True)

    def finish(self, split: Split) -> ShardFile | None:
        """Closes the file and returns its entry for the manifest; None if there were no rows."""
        with self._report_errors():
            if self._buffered_rows:
                self._flush(keep_remainder=False)
            if self._parquet is None:
                return None
            self._parquet.close()
            assert self._file is not None
            self._file.close()
        return ShardFile(
            path=self._path,
            split=split,
            num_bytes=self._file.num_bytes,
            sha256=self._file.digest.hexdigest(),
            row_groups=tuple(self._row_groups),
        )

    def discard(self) -> None:
        self._buffer, self._buffered_rows, self._buffered_bytes = [], 0, 0
        if self._parquet is not None:
            assert self._file is not None
            self._parquet.close()
            self._file.close()
            storage.remove(self._uri)
            self._parquet = None

    @contextmanager
    def _report_errors(self) -> Iterator[None]:
        with (
            report_task_errors(f"writing {self._uri!r} failed, nothing is committed"),
            storage.store_errors(self._uri),
        ):
            yield

    def _group_rows(self) -> int:
        if self._row_group_rows is not None:
            return self._row_group_rows
        row_bytes = max(1, self._buffered_bytes // self._buffered_rows)
        return max(1, min(MAX_ROW_GROUP_ROWS, ROW_GROUP_BYTES // row_bytes))

    def _flush(self, *, keep_remainder: bool) -> None:
        table = pa.Table.from_batches(self._buffer)
        group_rows, start = self._group_rows(), 0
        while table.num_rows - start >= group_rows or (not keep_remainder and start < table.num_rows):
            group = self._prepare(table.slice(start, group_rows))
            if self._parquet is None:
                self._open(group)
            self._parquet.write_table(group, row_group_size=group_rows)
            self._row_groups.append(group.num_rows)
            start += group.num_rows
        rest = table.num_rows - start
        self._buffered_bytes = self._buffered_bytes * rest // table.num_rows
        # These views keep at most the last batch in memory.
        self._buffer, self._buffered_rows = table.slice(start).to_batches() if rest else [], rest

    def _prepare(self, group: Any) -> Any:
        """Returns the columns to write of a row group."""
        return group

    def _open(self, first_group: Any) -> None:
        self._file = _DigestFile(storage.open_file(self._uri, "wb"))
        schema = first_group.schema
        # Parquet refuses a dictionary for a column with an encoding, and row numbers have an encoding.
        repeated = [name for name in schema.names if name != ROW and _repeats(first_group[name])]
        codecs = {
            name: self._compression if name in repeated else _codec(first_group[name], self._compression)
            for name in schema.names
        }
        self._parquet = pq.ParquetWriter(
            self._file,
            schema,
            compression=codecs | {f"{name}.list.element": codec for name, codec in codecs.items()},
            use_dictionary=repeated,
            # Ascending numbers take a few bits each.
            column_encoding={ROW: "DELTA_BINARY_PACKED"} if ROW in schema.names else None,
            # The manifest holds better statistics.
            write_statistics=False,
        )


class _DigestFile(io.RawIOBase):
    """A write-only file that counts and hashes its bytes, so that the checksum needs no second read."""

    def __init__(self, file: IO[Any]) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.num_bytes = 0

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.num_bytes += len(data)
        self._file.write(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._file.close()  # an object store shows the file only now

    def tell(self) -> int:
        return self.num_bytes

    def writable(self) -> bool:
        return True


def _schema(stored_types: Mapping[str, Any], arrays: Sequence[Any]) -> Any:
    """Returns the schema of a file. The first rows determine the width of fixed-size binary columns."""
    return pa.schema(
        pa.field(name, array.type if pa.types.is_fixed_size_binary(array.type) else stored, nullable=False)
        for (name, stored), array in zip(stored_types.items(), arrays, strict=True)
    )


def num_bytes(values: Any) -> int:
    """Returns the bytes of the values themselves, so that equal rows give equal row groups.

    The size of an Arrow buffer may be larger.
    """
    if pa.types.is_fixed_size_binary(values.type):
        return len(values) * int(values.type.byte_width)
    if pa.types.is_binary(values.type):
        return int(values.nbytes)
    leaf = values.flatten() if is_list(values.type) else values
    return len(leaf) * max(1, int(leaf.type.bit_width) // 8)


def _codec(column: Any, codec: str) -> str:
    """Returns `codec`, or "none" if compression would save less than the share `_LEAST_SAVED`."""
    if codec == "none":
        return codec
    array = column.chunk(0)
    buffer = array.buffers()[-1]
    first = array.offset * array.type.bit_width // 8 if pa.types.is_primitive(array.type) else 0
    sample = None if buffer is None else buffer.slice(first, min(_SAMPLE_BYTES, buffer.size - first))
    if not sample:
        return codec
    # Parquet's "lz4" is Arrow's "lz4_raw".
    packed = pa.compress(sample, "lz4_raw" if codec == "lz4" else codec)
    return "none" if packed.size > (1 - _LEAST_SAVED) * sample.size else codec


def _repeats(column: Any) -> bool:
    if pa.types.is_string(column.type):
        return True  # the files of references
    if not pa.types.is_integer(column.type):
        return False
    values = numbers(one_chunk(column))
    return len(np.unique(values)) * 8 <= len(values)
