"""Reads some rows of a large row group, and decodes only the pages that contain them.

The position of each page comes from the page index, or from the page headers. The pages with the wanted rows,
and the column's dictionary, are copied into a Parquet file in memory with a new footer. Arrow then reads this
file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ringspark.extras.external_tables.in_place.thrift_compact import (
    I32,
    I64,
    LIST,
    STRUCT,
    Struct,
    ThriftError,
    read_struct,
    write_struct,
)

_MAGIC = b"PAR1"
_DATA_PAGE, _DATA_PAGE_V2 = 0, 3
_BY_DICTIONARY = (2, 8)
"""Page encodings that use the dictionary.

For pages with other encodings the dictionary is left out, because Arrow would decode it too.
"""
# Most headers take less than 100 bytes, but they may hold the smallest and the largest string.
_HEADER_BYTES = 256
_LARGEST_HEADER = 1 << 20
_KEPT_DICTIONARIES = 32 << 20


def has_page_rows(metadata: Any, row_group: int, leaves: Sequence[int]) -> bool:
    group = metadata.row_group(row_group)
    return all(
        metadata.schema.column(leaf).max_repetition_level == 0 or group.column(leaf).has_offset_index
        for leaf in leaves
    )


def find_leaves(metadata: Any) -> dict[str, list[int]]:
    """Returns the indexes of the leaf columns of each top-level column."""
    schema = metadata.schema
    names = set(schema.to_arrow_schema().names)

    def owner(path: str) -> str:
        while path and path not in names:
            path = path.rpartition(".")[0]
        return path

    leaves: dict[str, list[int]] = {}
    for leaf in range(len(schema)):
        leaves.setdefault(owner(schema.column(leaf).path), []).append(leaf)
    return leaves


@dataclass(frozen=True, kw_only=True)
class _Pages:
    """Positions of the data pages of one column chunk.

    Attributes:
        first_rows: First row of each page, and at the end the number of rows; (pages + 1,).
        starts: Offset of each page in the file, and the offset at which the last page ends; (pages + 1,).
        dictionary: (start, stop) of the dictionary page; an empty range if there is none.
    """

    first_rows: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    dictionary: tuple[int, int]


_Chunk = tuple[str, int, int]  # the file, the row group and the leaf


class KeptPages:
    """Cache of page positions and dictionaries of files; valid as long as the files do not change."""

    def __init__(self) -> None:
        self.places: dict[_Chunk, _Pages] = {}
        self.dictionary_bytes = 0
        self._dictionaries: dict[_Chunk, bytes] = {}

    def dictionary(self, chunk: _Chunk, read: Callable[[], bytes]) -> bytes:
        data = self._dictionaries.pop(chunk, None)
        if data is None:
            data = read()
            self.dictionary_bytes += len(data)
        self._dictionaries[chunk] = data  # at the end, because the least recently used comes first
        while self.dictionary_bytes > _KEPT_DICTIONARIES:
            self.dictionary_bytes -= len(self._dictionaries.pop(next(iter(self._dictionaries))))
        return data


class PageReader:
    """Reads rows of one open, seekable file; `path` is the file's name in the cache `kept`."""

    def __init__(self, source: Any, metadata: Any, kept: KeptPages | None = None, path: str = "") -> None:
        self._source = source
        self._metadata = metadata
        self._kept = KeptPages() if kept is None else kept
        self._path = path
        self._footer: Struct | None = None
        self._size: int | None = None
        self._leaves: dict[str, list[int]] = {}

    def read(self, row_group: int, names: Sequence[str], start: int, stop: int) -> Any:
        """Returns rows `start` to `stop` of a row group as an Arrow table with the columns `names`.

        Names are those of top-level columns.

        Raises ValueError if the file is damaged, or if it is unknown which rows its pages hold.
        """
        try:
            return self._read(row_group, names, start, stop)
        except (LookupError, TypeError) as error:
            raise ValueError("its footer or its index of pages is damaged") from error

    def _read(self, row_group: int, names: Sequence[str], start: int, stop: int) -> Any:
        # Columns whose pages hold the same rows are read together, except leaves of one struct.
        self._leaves = self._leaves or find_leaves(self._metadata)
        spans: dict[tuple[int, int, int], list[tuple[str, int]]] = {}
        for name in names:
            for number, leaf in enumerate(self._leaves[name]):
                first, last = self._span(row_group, leaf, start, stop)
                spans.setdefault((number, first, last), []).append((name, leaf))
        parts: dict[str, list[Any]] = {name: [] for name in names}
        for (_, first, last), columns in sorted(spans.items()):
            table = self._table(row_group, [leaf for _, leaf in columns], first, last)
            if table.num_rows != last - first:
                raise ValueError(f"its pages hold {table.num_rows} rows, expected {last - first}")
            for name, _ in columns:
                parts[name].append(table.column(name).slice(start - first, stop - start))
        return pa.table({name: _join_leaves(columns) for name, columns in parts.items()})

    def _span(self, row_group: int, leaf: int, start: int, stop: int) -> tuple[int, int]:
        """Returns the first row and the stop row of the pages that hold the rows `start` to `stop`."""
        first_rows = self._pages_of(row_group, leaf).first_rows
        first = int(np.searchsorted(first_rows, start, side="right")) - 1
        last = int(np.searchsorted(first_rows, stop, side="left"))
        return int(first_rows[first]), int(first_rows[last])

    def _table(self, row_group: int, leaves: Sequence[int], first: int, last: int) -> Any:
        parts, size = [_MAGIC], len(_MAGIC)
        chunks: list[Struct] = []
        for leaf in leaves:
            pages = self._pages_of(row_group, leaf)
            bounds = np.searchsorted(pages.first_rows, [first, last])
            low, *starts, high = pages.starts[bounds[0] : bounds[1] + 1].tolist()
            body = self._bytes(low, high)
            # (number of values, encoding) of each page
            found = [_values_of(read_struct(body, start - low)[0]) for start in (low, *starts)]
            dictionary = b""
            if any(encoding in _BY_DICTIONARY for _, encoding in found):
                read = partial(self._bytes, *pages.dictionary)
                dictionary = self._kept.dictionary((self._path, row_group, leaf), read)
            num_bytes, known = len(dictionary) + len(body), self._chunk_of(row_group, leaf)[3][1]
            chunk: Struct = known | {
                5: (I64, sum(number for number, _ in found)),  # Arrow allocates memory for all values
                6: (I64, num_bytes),
                7: (I64, num_bytes),
                9: (I64, size + len(dictionary)),
            }
            if dictionary:
                chunk[11] = (I64, size)
            chunks.append({2: (I64, size), 3: (STRUCT, chunk)})
            parts += dictionary, body
            size += num_bytes
        footer = self._whole_footer()
        metadata: Struct = {
            1: footer[1],
            2: (LIST, (STRUCT, self._schema(leaves))),
            3: (I64, last - first),
            4: (LIST, (STRUCT, [{1: (LIST, (STRUCT, chunks)), 2: (I64, size), 3: (I64, last - first)}])),
        }
        if 6 in footer:
            metadata[6] = footer[6]  # Arrow works around known bugs of writers
        written = write_struct(metadata)
        # Arrow's pool reuses memory; fresh pages from the kernel take longer than decoding.
        data = pa.allocate_buffer(size + len(written) + 8)
        with pa.FixedSizeBufferWriter(data) as sink:
            for part in (*parts, written, len(written).to_bytes(4, "little"), _MAGIC):
                sink.write(part)
        file = pq.ParquetFile(pa.BufferReader(data), coerce_int96_timestamp_unit="us")
        return file.read(use_threads=False)

    def _schema(self, leaves: Sequence[int]) -> list[Struct]:
        elements: list[Struct] = self._whole_footer()[2][1][1]
        chains: list[list[Struct]] = []

        def walk(at: int, above: list[Struct]) -> int:
            children = elements[at].get(5, (I32, 0))[1]
            if not children:
                chains.append([*above, elements[at]])
                return at + 1
            inside = [*above, elements[at] | {5: (I32, 1)}]
            at += 1
            for _ in range(children):
                at = walk(at, inside)
            return at

        walk(0, [])
        root = chains[0][0] | {5: (I32, len(leaves))}
        return [root, *(element for leaf in leaves for element in chains[leaf][1:])]

    def _pages_of(self, row_group: int, leaf: int) -> _Pages:
        key, places = (self._path, row_group, leaf), self._kept.places
        if key not in places:
            chunk = self._chunk_of(row_group, leaf)
            rows = self._metadata.row_group(row_group).num_rows
            column = self._metadata.row_group(row_group).column(leaf)
            begin = column.data_page_offset
            # Some writers set 0 if there is none.
            if column.has_dictionary_page and 0 < (column.dictionary_page_offset or 0) < begin:
                begin = column.dictionary_page_offset
            end = begin + column.total_compressed_size
            has_index = 4 in chunk and 5 in chunk
            found = _from_index(self, chunk) if has_index else _from_headers(self, chunk, begin, end, rows)
            first_rows, starts = (np.asarray(numbers, dtype=np.int64) for numbers in found)
            pages = _Pages(
                first_rows=np.append(first_rows, rows), starts=starts, dictionary=(begin, int(starts[0]))
            )
            _check_pages(pages, begin, end)
            places[key] = pages
        return places[key]

    def _chunk_of(self, row_group: int, leaf: int) -> Struct:
        group: Struct = self._whole_footer()[4][1][1][row_group]
        chunk: Struct = group[1][1][1][leaf]
        return chunk

    def _whole_footer(self) -> Struct:
        if self._footer is None:
            size = self._num_bytes()
            length = int.from_bytes(self._bytes(size - 8, size - 4), "little")
            footer, _ = read_struct(self._bytes(size - 8 - length, size - 8))
            self._footer = _strip_footer(footer)
        return self._footer

    def _bytes(self, start: int, stop: int) -> bytes:
        # Checked first, because Arrow's file would allocate any size from a damaged footer.
        if not 0 <= start <= stop <= self._num_bytes():
            raise ValueError(f"it has no bytes {start} to {stop}, but its footer refers to them")
        self._source.seek(start)
        data = bytes(self._source.read(stop - start))
        if len(data) != stop - start:
            raise ValueError(f"it ended before byte {stop}")
        return data

    def _num_bytes(self) -> int:
        if self._size is None:
            self._source.seek(0, 2)
            self._size = int(self._source.tell())
        return self._size

    def _header(self, start: int, end: int) -> tuple[Struct, int]:
        size = _HEADER_BYTES
        while True:
            data = self._bytes(start, min(start + size, end))
            try:
                header, length = read_struct(data)
                return header, start + length
            except ThriftError:
                if size >= _LARGEST_HEADER or start + size >= end:
                    raise
                size *= 8


def _strip_footer(footer: Struct) -> Struct:
    """Removes the parts of a footer that are not needed to read pages, because statistics may be large."""
    groups: list[Struct] = []
    for group in footer[4][1][1]:
        chunks: list[Struct] = []
        for chunk in group[1][1][1]:
            known: Struct = {number: chunk[3][1][number] for number in (1, 2, 3, 4, 5)}
            chunks.append({n: chunk[n] for n in (4, 5) if n in chunk} | {3: (STRUCT, known)})
        groups.append({1: (LIST, (STRUCT, chunks))})
    kept = {number: footer[number] for number in (1, 2, 6) if number in footer}
    return kept | {4: (LIST, (STRUCT, groups))}


def _from_index(reader: PageReader, chunk: Struct) -> tuple[list[int], list[int]]:
    """Returns the first row of each page, and the start of each page with the end of the last one."""
    start, size = chunk[4][1], chunk[5][1]
    index, _ = read_struct(reader._bytes(start, start + size))
    locations: list[Struct] = index[1][1][1]
    last = locations[-1]
    starts = [page[1][1] for page in locations]
    return [page[3][1] for page in locations], [*starts, last[1][1] + last[2][1]]


def _from_headers(
    reader: PageReader, chunk: Struct, begin: int, end: int, rows: int
) -> tuple[list[int], list[int]]:
    """Returns the same as `_from_index`, for a column with one value per row."""
    num_values = chunk[3][1][5][1]
    first_rows, starts, at, row, stop = [], [], begin, 0, begin
    while row < num_values and at < end:
        header, body = reader._header(at, end)
        kind, following = header[1][1], body + header[3][1]
        if kind in (_DATA_PAGE, _DATA_PAGE_V2):
            first_rows.append(row)
            starts.append(at)
            row += _values_of(header)[0]
            stop = following
        at = following
    if row != rows:
        raise ValueError(f"its pages hold {row} values for {rows} rows")
    return first_rows, [*starts, stop]


def _values_of(header: Struct) -> tuple[int, int]:
    if header[1][1] == _DATA_PAGE:
        return header[5][1][1][1], header[5][1][2][1]
    return header[8][1][1][1], header[8][1][4][1]


def _check_pages(pages: _Pages, begin: int, end: int) -> None:
    """Raises ValueError if page positions are impossible; they determine what is read, and how much."""
    places = np.concatenate([[begin], pages.starts, [end]])
    if pages.first_rows[0] != 0 or (np.diff(pages.first_rows) < 0).any() or (np.diff(places) < 0).any():
        raise ValueError("its index of pages is damaged")


def _join_leaves(parts: Sequence[Any]) -> Any:
    arrays = [part.combine_chunks() for part in parts]
    arrays = [pa.concat_arrays(a.chunks) if isinstance(a, pa.ChunkedArray) else a for a in arrays]
    if len(arrays) == 1:
        return arrays[0]
    fields = [array.type.field(0).name for array in arrays]
    return pa.StructArray.from_arrays(
        [array.flatten()[0] for array in arrays], names=fields, mask=arrays[0].is_null()
    )
