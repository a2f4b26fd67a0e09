"""Reads rows of a table's files by the references to them that shards hold.

A row of such a shard has the name of a file and the row's number in it. Its columns are read there, and
converted to the arrays that `write_shards` would have stored. Everything else is as in other shards: order,
row groups, statistics, commit, checks and engines.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ringspark.extras.external_tables.in_place.listing import Int64Array
from ringspark.extras.external_tables.in_place.row_pages import (
    KeptPages,
    PageReader,
    find_leaves,
    has_page_rows,
)
from ringspark.pipelines import storage
from ringspark.pipelines.columns import Column
from ringspark.pipelines.kinds import Binary, Kind
from ringspark.pipelines.kinds.base import number_type, one_chunk
from ringspark.pipelines.kinds.scalar import SPARK_DTYPES
from ringspark.pipelines.rows import Rows
from ringspark.pipelines.table_files import (
    FILE,
    ROW,
    FileColumn,
    FileState,
    RowsDifferError,
    changed_problem,
    parse_file,
)

_OPEN_FILES = 64
# Parquet writers make pages of at most this many rows. A row group that is not larger is read whole.
_PAGE_ROWS = 20_000
_ROWS_AT_ONCE = 1 << 16
# A larger row group must have a page index: else each row group of a shard decodes all of it again.
_MOST_UNSPLIT_ROWS = 1 << 17

OpenFile = Callable[[str, int], Any]


class ReferencedRows:
    """Reads the rows of references. Keeps files open; `close` closes them.

    Attributes:
        columns: The columns to read from the files.
        file_columns: Names, casts and field IDs of these columns in the files.
        open_file: Opens a file of a given number of bytes; a reader has a faster way for remote stores.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        file_columns: Mapping[str, FileColumn],
        open_file: OpenFile | None = None,
    ) -> None:
        self.columns = [column for column in columns if column.name in file_columns]
        self.file_columns = file_columns
        self._files: OrderedDict[str, _TableFile] = OrderedDict()
        self._open_file = open_file or _open_file
        self._kept = KeptPages()

    def resolve(self, table: Any) -> Any:
        """Returns a table of a shard with stored columns instead of references."""
        if not self.columns:
            return table
        rows = one_chunk(table.column(ROW)).to_numpy()
        read = self.read(one_chunk(table.column(FILE)), rows)
        stored = {name: table.column(name) for name in table.column_names if name not in (FILE, ROW)}
        return pa.table(stored | read)

    def read(self, files: Any, rows: Int64Array) -> dict[str, Any]:
        """Returns the columns as stored arrays, by stored name.

        Args:
            files: Arrow array of `FILE`.
            rows: Rows of each file, in the order of the result.

        Raises:
            ValueError: A file has changed, or holds other columns.
            RowsDifferError: The values do not fit the column types.
        """
        encoded = files.dictionary_encode()
        numbers = encoded.indices.to_numpy(zero_copy_only=False)
        starts = _starts(numbers) if len(encoded.dictionary) > 1 else np.zeros(min(1, len(rows)), np.int64)
        parts = []
        for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(rows)], strict=True):
            file = self._open(encoded.dictionary[int(numbers[start])].as_py())
            parts.append(file.read(rows[start:stop]))
        stored: dict[str, Any] = {}
        for index, column in enumerate(self.columns):
            # Files may differ in a column's type, for example int32 and int64.
            arrays = [self._encode(column, part[index]) for part in parts]
            for number, name in enumerate(column.kind.stored(column.name)):
                stored[name] = pa.chunked_array([each[number] for each in arrays])
        return stored

    def check(self) -> None:
        """Raises ValueError if an open file has changed."""
        _check([parse_file(text) for text in self._files])

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _encode(self, column: Column, values: Any) -> list[Any]:
        try:
            for type_name in self.file_columns[column.name].casts:
                values = values.cast(number_type(SPARK_DTYPES[type_name]), safe=False)
            return encode_column(values, column.kind)
        except (ValueError, pa.ArrowException) as error:
            raise RowsDifferError(f"column {column.name!r} {error}") from error

    def _open(self, text: str) -> _TableFile:
        if text in self._files:
            self._files.move_to_end(text)
            return self._files[text]
        if len(self._files) >= _OPEN_FILES:
            closed, file = self._files.popitem(last=False)
            file.close()
            _check([parse_file(closed)])
        state = parse_file(text)
        _check([state])
        wanted = [self.file_columns[column.name] for column in self.columns]
        self._files[text] = _TableFile(state, wanted, self._open_file, self._kept)
        return self._files[text]


class _TableFile:
    """One open file of a table, and the columns `wanted` in it."""

    def __init__(
        self, state: FileState, wanted: Sequence[FileColumn], open_file: OpenFile, kept: KeptPages
    ) -> None:
        path, num_bytes, _ = state
        with ExitStack() as stack:
            source = stack.enter_context(open_file(path, num_bytes))
            # In a store, one request fetches all adjacent columns of a row group.
            self._file = pq.ParquetFile(
                source, pre_buffer=not storage.is_local(path), coerce_int96_timestamp_unit="us"
            )
            metadata, schema = self._file.metadata, self._file.schema_arrow
            self._names = [_find_name(column, schema, path) for column in wanted]
            self._distinct = list(dict.fromkeys(self._names))
            self._fields = [
                (schema.field(name), column.fields) for name, column in zip(self._names, wanted, strict=True)
            ]
            sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
            self._starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
            leaves = find_leaves(metadata)
            chosen = [leaf for name in self._distinct for leaf in leaves[name]]
            # The page reader joins the leaves of a struct only if none is in a struct inside of it.
            is_flat = all(_depth(schema.field(name).type) < 2 for name in self._names)
            self._splits = [is_flat and has_page_rows(metadata, group, chosen) for group in range(len(sizes))]
            for size, splits in zip(sizes, self._splits, strict=True):
                if size > _MOST_UNSPLIT_ROWS and not splits:
                    raise RowsDifferError(
                        f"{path!r} has a row group of {size} rows that cannot be read in parts, because its "
                        "arrays have no page index, or because it has structs inside of structs"
                    )
            self._pages = PageReader(source, metadata, kept, path)
            self._stack = stack.pop_all()

    def close(self) -> None:
        self._stack.close()

    def read(self, rows: Int64Array) -> list[Any]:
        """Returns an Arrow array per column."""
        if len(rows) and not 0 <= rows.min() <= rows.max() < self._starts[-1]:
            raise ValueError(f"it has {self._starts[-1]} rows, but a reference names row {rows.max()}")
        parts: list[Any] = []
        whole: list[tuple[int, int, Int64Array]] = []
        for group, local in self._by_group(rows):
            size = int(self._starts[group + 1] - self._starts[group])
            span = int(local.max() - local.min()) + 1
            by_pages = size > _PAGE_ROWS and span * 10 < size * 7 and self._splits[group]
            # One call reads several small row groups.
            if whole and (by_pages or sum(n for _, n, _ in whole) + size > _ROWS_AT_ONCE):
                parts.append(self._read_whole(whole))
                whole = []
            if by_pages:
                parts += self._read_pages(group, local)
            else:
                whole.append((group, size, local))
        if whole:
            parts.append(self._read_whole(whole))
        table = pa.concat_tables(parts)
        columns = [one_chunk(table.column(name)) for name in self._names]
        return [_rename(values, *each) for values, each in zip(columns, self._fields, strict=True)]

    def _by_group(self, rows: Int64Array) -> Iterator[tuple[int, Int64Array]]:
        """Yields row groups and the rows in each, in the order of `rows`."""
        numbers = np.searchsorted(self._starts, rows, side="right") - 1
        cuts = np.flatnonzero(np.diff(numbers)) + 1
        for group, part in zip(numbers[[0, *cuts]].tolist(), np.split(rows, cuts), strict=True):
            yield group, part - self._starts[group]

    def _read_whole(self, wanted: Sequence[tuple[int, int, Int64Array]]) -> Any:
        table = self._file.read_row_groups(
            [group for group, _, _ in wanted], self._distinct, use_threads=False
        )
        starts = np.cumsum([0, *(size for _, size, _ in wanted)])
        return _take(
            table, np.concatenate([s + rows for s, (_, _, rows) in zip(starts, wanted, strict=False)])
        )

    def _read_pages(self, group: int, rows: Int64Array) -> Iterator[Any]:
        at = 0
        while at < len(rows):
            low = int(rows[at])
            # Rows ascend in a file, as Spark scans it.
            stop = max(at + 1, int(np.searchsorted(rows, low + _ROWS_AT_ONCE)))
            wanted = rows[at:stop]
            low, high = int(wanted.min()), int(wanted.max()) + 1
            yield _take(self._pages.read(group, self._distinct, low, high), wanted - low)
            at = stop


def decode_column(values: Any, kind: Kind) -> Rows:
    """Returns the rows of a file's column, given as one Arrow array without nulls, or raises ValueError."""
    return kind.decode(encode_column(values, kind))


def encode_column(values: Any, kind: Kind) -> list[Any]:
    """Returns the arrays that `write_shards` would store for a file's column, or raises ValueError.

    The values are converted to the array that Spark would pass to the writer, and then go through the same
    `Kind.encode`. The numbers are therefore bitwise the same.
    """
    values = kind.read_values(values)
    if isinstance(kind, Binary):
        # The bytes were checked one by one when the rows were measured.
        return [values]
    values, problems = kind.read(values)
    if problems:
        raise ValueError(next(iter(problems.values())))
    return kind.encode(values).arrays


def _starts(numbers: Any) -> Any:
    """Returns where runs of equal numbers start."""
    return np.flatnonzero(np.diff(numbers, prepend=-1)) if len(numbers) else np.zeros(0, np.int64)


def _is_run(rows: Int64Array) -> bool:
    return bool(rows[-1] - rows[0] == len(rows) - 1 and (rows[1:] > rows[:-1]).all())


def _take(table: Any, rows: Int64Array) -> Any:
    if _is_run(rows):
        return table.slice(rows[0], len(rows))  # a view
    return table.take(pa.array(rows))


def _find_name(column: FileColumn, schema: Any, path: str) -> str:
    found = _find_names(column, list(schema))
    if len(found) != 1:
        raise RowsDifferError(f"{path!r} has {len(found)} columns {column.name!r}, and one is needed")
    return found[0]


def _find_names(column: FileColumn, fields: Sequence[Any]) -> list[str]:
    """Returns the names of a column in a file; Spark may read names without regard to case."""
    if column.field_id is not None:
        wanted = str(column.field_id).encode()
        return [field.name for field in fields if (field.metadata or {}).get(b"PARQUET:field_id") == wanted]
    low, names = column.name.lower(), [field.name for field in fields]
    return [name for name in names if name == column.name] or [n for n in names if n.lower() == low]


def _rename(values: Any, stored: Any, fields: Mapping[str, FileColumn]) -> Any:
    """Returns a struct with the names of `fields`; a field that the file lacks is null, as in Spark."""
    if not fields or not pa.types.is_struct(values.type):
        return values
    parts = []
    for column in fields.values():
        found = _find_names(column, list(stored.type))
        parts.append(pa.nulls(len(values), pa.float64()))
        if len(found) == 1:
            parts[-1] = _rename(pc.struct_field(values, found), stored.type.field(found[0]), column.fields)
    return pa.StructArray.from_arrays(parts, names=list(fields), mask=values.is_null())


def _depth(data_type: Any) -> int:
    if not pa.types.is_struct(data_type):
        return 0
    return 1 + max((_depth(field.type) for field in data_type), default=0)


def _check(files: Sequence[FileState]) -> None:
    if (problem := changed_problem(files)) is not None:
        raise ValueError(problem)


def _open_file(path: str, num_bytes: int) -> Any:
    return pa.OSFile(path) if storage.is_local(path) else storage.open_file(path)
