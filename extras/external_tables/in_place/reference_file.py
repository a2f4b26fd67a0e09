"""Writes a shard of references to rows of files, and compares each row of the files with Spark's.

If Arrow reads a calendar, a cast or a type differently from Spark, the write therefore fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringspark.extras.external_tables.in_place.referenced_rows import ReferencedRows
from ringspark.pipelines.columns import Column
from ringspark.pipelines.kinds.base import is_list, list_offsets, one_chunk
from ringspark.pipelines.manifest import ShardFile, Split
from ringspark.pipelines.table_files import FILE, NUM_BYTES, ROW, FileColumn, RowsDifferError
from ringspark.pipelines.writing.shard_file import ShardFileWriter, num_bytes


class ReferenceFileWriter(ShardFileWriter):
    """Writes references, and the columns that are not in `file_columns`; `add` gets the references last.

    Raises RowsDifferError if a file holds other values. Row groups have the same rows as in a copy.
    """

    def __init__(
        self,
        uri: str,
        path: str,
        columns: Sequence[Column],
        file_columns: Mapping[str, FileColumn],
        **settings: Any,
    ) -> None:
        stored_types = {name: kind for c in columns for name, kind in c.kind.stored(c.name).items()}
        super().__init__(uri, path, stored_types | {NUM_BYTES: pa.int64()}, **settings)
        self._columns = columns
        self._rows = ReferencedRows(columns, file_columns)

    def add(self, arrays: Sequence[Any]) -> None:
        *data, _, _ = arrays
        super().add([*arrays, pa.array(_row_bytes(data))])

    def finish(self, split: Split) -> ShardFile | None:
        try:
            return super().finish(split)
        finally:
            self._rows.close()

    def discard(self) -> None:
        super().discard()
        self._rows.close()

    def _prepare(self, group: Any) -> Any:
        found = self._rows.read(one_chunk(group.column(FILE)), one_chunk(group.column(ROW)).to_numpy())
        for column in self._rows.columns:
            for name in column.kind.stored(column.name):
                if not _is_same(one_chunk(group.column(name)), one_chunk(found[name])):
                    raise RowsDifferError(
                        f"column {column.name!r} has other values in the files than in Spark, perhaps "
                        "because of dates in another calendar, or of a type that Spark converts"
                    )
        return group.select([name for name in group.column_names if name not in found])


def _row_bytes(arrays: Sequence[Any]) -> Any:
    """Returns the bytes that each row would take in a shard: (rows,) int64."""
    total = np.zeros(len(arrays[0]), np.int64)
    for array in arrays:
        if is_list(array.type):
            lengths = pc.list_value_length(array).to_numpy(zero_copy_only=False)
            total += lengths * (max(1, array.type.value_type.bit_width // 8))
        elif pa.types.is_binary(array.type):
            total += pc.binary_length(array).to_numpy(zero_copy_only=False) + 4
        else:
            total += num_bytes(array) // max(1, len(array))
    return total


def _is_same(left: Any, right: Any) -> bool:
    """Returns whether two arrays without nulls have equal bits; NaN equals NaN, and 0.0 differs from -0.0."""
    if left.null_count or right.null_count:
        return False
    if is_list(left.type) and is_list(right.type):
        has_same_lengths = np.array_equal(list_offsets(left), list_offsets(right))
        return has_same_lengths and _is_same(left.flatten(), right.flatten())
    if left.type == right.type and pa.types.is_floating(left.type):
        bits = f"int{left.type.bit_width}"
        left, right = left.view(bits), right.view(bits)
    return bool(left.type == right.type and left.equals(right))
