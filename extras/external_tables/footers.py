"""Reads the footers of an external table's files, and checks that a column has the same type in all files."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ringspark.extras.external_tables.in_place.row_pages import find_leaves, has_page_rows
from ringspark.pipelines import storage
from ringspark.pipelines.kinds.base import is_list

_THREADS = 32
_VALUE_BYTES = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8}
_SHORT_BYTES = {"INT_8": 1, "UINT_8": 2, "INT_16": 2}  # as Spark reads them


@dataclass(frozen=True, kw_only=True)
class Footer:
    """What a file's footer says about some columns.

    Attributes:
        types: Arrow type of each column, as text; "" if the file does not have the column.
        num_bytes: Bytes of these columns in memory, per row group. For strings this is a lower bound.
        list_bytes: The part of `num_bytes` that array columns take, per row group.
        cuts: For each row group, whether readers can split it. They must know which rows each page holds.
        rebase: Calendar of each column's dates and timestamps: "LEGACY" (Julian), "CORRECTED" (Gregorian), or
            the name of the Spark setting that determines it.
        problem: Reason why the file cannot be read, or "".
    """

    row_groups: tuple[int, ...] = ()
    types: tuple[str, ...] = ()
    num_bytes: tuple[int, ...] = ()
    list_bytes: tuple[int, ...] = ()
    cuts: tuple[bool, ...] = ()
    rebase: tuple[str, ...] = ()
    problem: str = ""


def read_footers(uris: Sequence[str], names: Sequence[str]) -> list[Footer]:
    """Reads the footers of all files, on the driver.

    Raises ValueError if a file cannot be read or lacks a column, or if column types differ.
    """
    with ThreadPoolExecutor(min(_THREADS, len(uris)), thread_name_prefix="ringspark-footer") as pool:
        footers = list(pool.map(partial(_read_footer, names=names), uris))
    for uri, footer in zip(uris, footers, strict=True):
        if footer.problem:
            raise ValueError(f"{uri!r} {footer.problem}")
        for name, type_, first in zip(names, footer.types, footers[0].types, strict=True):
            if not type_:
                raise ValueError(
                    f"{uri!r} has no column {name!r}, which other files of the table have; write the table "
                    "with write_shards"
                )
            if type_ != first:
                raise ValueError(
                    f"{uri!r} holds column {name!r} as {type_}, but {uris[0]!r} as {first}; cast it and "
                    "write the table again, with Spark or write_shards"
                )
    return footers


def _read_footer(uri: str, names: Sequence[str]) -> Footer:
    try:
        with storage.store_errors(uri), storage.open_file(uri) as source:
            file = pq.ParquetFile(source)
            metadata, schema = file.metadata, file.schema_arrow
    except (OSError, pa.ArrowException) as error:
        return Footer(
            problem=f"cannot be read as Parquet ({error}); remove it, or hide it with '_' before its name"
        )
    groups = range(metadata.num_row_groups)
    leaves_by_name = find_leaves(metadata)
    leaves = [leaf for name in names for leaf in leaves_by_name.get(name, [])]
    lists = [leaf for leaf in leaves if metadata.schema.column(leaf).max_repetition_level]
    return Footer(
        row_groups=tuple(metadata.row_group(group).num_rows for group in groups),
        types=tuple(
            _plain(schema.field(name).type) if schema.names.count(name) == 1 else "" for name in names
        ),
        num_bytes=tuple(sum(_decoded_bytes(metadata, group, leaf) for leaf in leaves) for group in groups),
        list_bytes=tuple(sum(_decoded_bytes(metadata, group, leaf) for leaf in lists) for group in groups),
        cuts=tuple(has_page_rows(metadata, group, leaves) for group in groups),
        rebase=tuple(_rebase(metadata, leaves_by_name.get(name, [])) for name in names),
    )


def _rebase(metadata: Any, leaves: Sequence[int]) -> str:
    """Returns the calendar of a column, by the rules of Spark's `DataSourceUtils.getRebaseSpec`."""
    is_int96 = any(metadata.schema.column(leaf).physical_type == "INT96" for leaf in leaves)
    since, mark = (b"3.1.0", b"legacyINT96") if is_int96 else (b"3.0.0", b"legacyDateTime")
    notes = metadata.metadata or {}
    if (version := notes.get(b"org.apache.spark.version")) is None:
        return f"spark.sql.parquet.{'int96' if is_int96 else 'datetime'}RebaseModeInRead"
    return "LEGACY" if version < since or b"org.apache.spark." + mark in notes else "CORRECTED"


def _decoded_bytes(metadata: Any, group: int, leaf: int) -> int:
    """Returns the size of a column chunk in memory, in bytes. Its size in the file may be far smaller."""
    chunk, converted = metadata.row_group(group).column(leaf), metadata.schema.column(leaf).converted_type
    value_bytes = _SHORT_BYTES.get(converted, _VALUE_BYTES.get(chunk.physical_type))
    return int(chunk.total_uncompressed_size if value_bytes is None else chunk.num_values * value_bytes)


def _plain(data_type: Any) -> str:
    if pa.types.is_dictionary(data_type):
        return _plain(data_type.value_type)
    if pa.types.is_large_string(data_type):
        return "string"
    if pa.types.is_large_binary(data_type):
        return "binary"
    if is_list(data_type) or pa.types.is_fixed_size_list(data_type):
        return f"list<{_plain(data_type.value_type)}>"
    return str(data_type)
