"""Creates the manifest of an external table, which refers to the table's own files; nothing is copied.

A Spark job reads all rows once and collects the statistics that `fit` checks. Large row groups are divided
into windows, which readers and `plan_epoch` handle like row groups.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ringspark.extras.external_tables.footers import Footer, read_footers
from ringspark.extras.external_tables.in_place.listing import Listing
from ringspark.extras.external_tables.in_place.referenced_rows import decode_column
from ringspark.extras.external_tables.in_place.table_frame import read_listing
from ringspark.pipelines import storage
from ringspark.pipelines.columns import Column, columns_from_spark
from ringspark.pipelines.job_names import name_jobs
from ringspark.pipelines.kinds import Kind, Scalar
from ringspark.pipelines.kinds.base import number_type
from ringspark.pipelines.kinds.table_row import TableRow
from ringspark.pipelines.local_python import choose_python
from ringspark.pipelines.manifest import ShardFile, ShardManifest, Split
from ringspark.pipelines.spark_errors import explain_worker_errors, report_task_errors
from ringspark.pipelines.table_files import TableFile
from ringspark.pipelines.writing.shard_file import ROW_GROUP_BYTES
from ringspark.pipelines.writing.shard_writer import REPORT_SCHEMA, HandleInvalid, WritePlan, write_partition
from ringspark.pipelines.writing.shards import learn, must_learn
from ringspark.pipelines.writing.task_reports import join_reports

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WINDOW_ROWS = 20_000
"""Rows per window, at most.

parquet-mr and Arrow write pages of at most this many rows, so windows match pages.
"""

MAX_UNSPLIT_BYTES = 2 << 30
"""Largest total size of the row groups in memory that cannot be split, over all readers, in bytes."""

# The streams of an epoch, with two row groups each (see `epoch_plan`).
_GROUPS_IN_USE = 96
_MEASURED_ROWS = 16_384
# First days and microseconds since 1970 that are equal in both calendars of Spark's `RebaseDateTime`, Julian
# and Gregorian, in every time zone.
_FIRST_EQUAL = {"date": -141_427, "timestamp": -2_208_988_800_000_000}


def table_manifest(
    spark: SparkSession,
    listing: Listing,
    columns: Sequence[str] | None = None,
    kinds: Mapping[str, Kind] | None = None,
    validation_col: str | None = None,
) -> ShardManifest:
    """Creates the manifest of an external table, without saving it.

    Runs on the driver, and starts a Spark job that reads all rows.

    Args:
        listing: The table, from `list_parquet` or `list_delta`.
        columns: Names of the columns to use; all by default.
        kinds: Column types by column name, as in `write_shards`.
        validation_col: Partition column with the values 0 and 1; files with 1 are the "validation" split.

    Raises:
        ValueError: A column cannot be trained on or holds nulls, files have different columns, or row groups
            are too large.
    """
    if listing.deleted or listing.file_schema is not None:
        raise ValueError(
            f"the table {listing.source.uri!r} has deleted rows or other column names than its files; use "
            "fitOnDelta or fitOnTable"
        )
    found = _columns(spark, listing, columns, kinds or {}, validation_col)
    in_files = [column for column in found if column.name not in listing.folder_columns]
    if not in_files:
        names = [column.name for column in found]
        raise ValueError(f"columns {names} are all partition columns; add a column from the files")
    uris = [storage.join(listing.source.uri, path) for path, _, _ in listing.files]
    footers = read_footers(uris, [column.name for column in in_files])
    _check_types(in_files, footers[0], uris[0])
    rows = [sum(footer.row_groups) for footer in footers]
    if not any(rows):
        raise ValueError(f"the table {listing.source.uri!r} has no rows; pass a table that has rows")
    splits = _splits(listing, validation_col)
    if any(map(must_learn, found)):
        seen = [n for n, split in enumerate(splits) if split == "train"] or list(range(len(splits)))
        of_folders = {name: of_files.take(seen) for name, of_files in listing.folder_columns.items()}
        files_seen = tuple(listing.files[number] for number in seen)
        frame = read_listing(spark, replace(listing, files=files_seen, folder_columns=of_folders))
        found = tuple(learn(frame, column) for column in found)
    folders = {
        column.name: _folder_values(column, listing.folder_columns[column.name], rows)
        for column in found
        if column.name in listing.folder_columns
    }
    manifest = _measure_table(spark, listing, footers, found, folders, splits)
    _check_calendar(spark, listing, footers, manifest, [column.name for column in in_files])
    # As many rows as fill a row group of our shards, or a page.
    row_bytes = sum(map(manifest.mean_row_bytes, manifest.columns))
    window = max(1, min(WINDOW_ROWS, int(ROW_GROUP_BYTES / max(1, row_bytes))))
    _check_unsplit(listing, footers, window)
    values: dict[str, Any] = {
        name: decode_column(of_files, manifest.column(name).kind) for name, of_files in folders.items()
    }
    files = [
        ShardFile(
            path=path,
            split=splits[number],
            num_bytes=num_bytes,
            sha256="",
            row_groups=footer.row_groups,
            table=TableFile(
                state=state,
                window_rows=window if _can_split(footer, window) else 0,
                values={name: of_files[number].item() for name, of_files in values.items()},
            ),
        )
        for number, ((path, num_bytes, state), footer) in enumerate(zip(listing.files, footers, strict=True))
    ]
    return replace(manifest, uri=listing.source.uri, table=listing.source, files=tuple(files))


def _columns(
    spark: SparkSession,
    listing: Listing,
    columns: Sequence[str] | None,
    kinds: Mapping[str, Kind],
    validation_col: str | None,
) -> tuple[Column, ...]:
    from pyspark.sql.types import StructType

    names = list(dict.fromkeys(columns or [n for n in listing.schema.names if n != validation_col]))
    if unknown := [name for name in names if name not in listing.schema.names]:
        raise ValueError(
            f"the table {listing.source.uri!r} has no column {unknown[0]!r}; it has {listing.schema.names}"
        )
    chosen = {name: kind for name, kind in kinds.items() if name in names}
    found = columns_from_spark(StructType([listing.schema[name] for name in names]), chosen)
    for column in found:
        if isinstance(column.kind, TableRow):
            raise ValueError(
                f"column {column.name!r} has type {column.kind.tag}, which is computed when rows are "
                "written, but an external table is read in place; use fit(df), or write_shards"
            )
    return found


def _check_types(columns: Sequence[Column], footer: Footer, uri: str) -> None:
    """Raises ValueError if Spark reads a time column as numbers: Arrow may count in another unit of time."""
    times = ("date", "time", "duration")
    for column, stored in zip(columns, footer.types, strict=True):
        if stored.startswith(times) and not column.source.startswith(times):
            raise ValueError(
                f"{uri!r} holds column {column.name!r} as {stored}, but Spark reads it as {column.source}; "
                "cast it and write the table again, or use fit(df)"
            )


def _measure_table(
    spark: SparkSession,
    listing: Listing,
    footers: Sequence[Footer],
    columns: Sequence[Column],
    folders: Mapping[str, Any],
    splits: Sequence[Split],
) -> ShardManifest:
    error: HandleInvalid = "error"
    plan = WritePlan(
        uri=listing.source.uri,
        folder="",
        columns=tuple(columns),
        handle_invalid=(error,) * len(columns),
        splits=True,
        only_measures=True,
    )
    work = [
        (number, path, group, splits[number] == "validation")
        for number, ((path, _, _), footer) in enumerate(zip(listing.files, footers, strict=True))
        for group in range(len(footer.row_groups))
    ]
    choose_python(spark)
    with explain_worker_errors(), name_jobs(spark, f"measure {len(work)} row groups"):
        tasks = spark.range(0, len(work)).mapInArrow(partial(_measure, plan, folders, work), REPORT_SCHEMA)
        reports = [json.loads(row["report"]) for row in tasks.collect()]
    rows = sum(report["rows"] for report in reports)
    for index, column in enumerate(columns):
        if nulls := sum(report["nulls"][index] for report in reports):
            raise ValueError(_describe_nulls(column.name, nulls, rows))
    for report in reports:
        if report["problem"] is not None:
            raise ValueError(f"{report['problem']} (table {listing.source.uri!r})")
    if rows != sum(sum(footer.row_groups) for footer in footers):
        raise ValueError(f"the table {listing.source.uri!r} changed while it was read; try again")
    return join_reports(plan, reports, [])


def _check_calendar(
    spark: SparkSession,
    listing: Listing,
    footers: Sequence[Footer],
    measured: ShardManifest,
    names: Sequence[str],
) -> None:
    """Raises ValueError for times in the Julian calendar, which Spark and Arrow read differently."""
    for index, column in enumerate(map(measured.column, names)):
        lowest = measured.range_of(column.name)
        if column.source not in _FIRST_EQUAL or lowest is None or lowest[0] >= _FIRST_EQUAL[column.source]:
            continue
        for (path, _, _), footer in zip(listing.files, footers, strict=True):
            mode = footer.rebase[index]
            if (spark.conf.get(mode) if mode.startswith("spark.") else mode) != "CORRECTED":
                uri = storage.join(listing.source.uri, path)
                since = "dates before 1582-10-15" if column.source == "date" else "timestamps before 1900"
                raise ValueError(
                    f"column {column.name!r} holds {since}, and {uri!r} was written in the Julian calendar "
                    f"of Spark 2 or Hive ({mode}), so they would be read as other days; train with fit(df), "
                    "or write the table with write_shards"
                )


def _measure(
    plan: WritePlan,
    folders: Mapping[str, Any],
    work: Sequence[tuple[int, str, int, bool]],
    batches: Iterator[Any],
) -> Iterator[Any]:
    numbers = (number for batch in batches for number in batch.column(0).to_pylist())
    rows = chain.from_iterable(_row_group(plan, folders, *work[number]) for number in numbers)
    yield from write_partition(plan, rows)


def _row_group(
    plan: WritePlan, folders: Mapping[str, Any], file: int, path: str, group: int, is_held_out: bool
) -> Iterator[Any]:
    uri = storage.join(plan.uri, path)
    names = [column.name for column in plan.columns]
    in_file = [name for name in names if name not in folders]
    with (
        report_task_errors(f"reading {uri!r} failed"),
        storage.store_errors(uri),
        storage.open_file(uri) as source,
    ):
        parquet = pq.ParquetFile(source, coerce_int96_timestamp_unit="us")
        for batch in parquet.iter_batches(_MEASURED_ROWS, [group], in_file, use_threads=False):
            values = {name: pa.repeat(of_files[file], batch.num_rows) for name, of_files in folders.items()}
            values |= {name: batch.column(name) for name in in_file}
            arrays = [_given(values[column.name], column) for column in plan.columns]
            arrays.append(pa.array(np.full(batch.num_rows, is_held_out)))
            yield pa.RecordBatch.from_arrays(arrays, names=[*names, ""])


def _given(values: Any, column: Column) -> Any:
    try:
        return column.kind.read_values(values)
    except (ValueError, pa.ArrowException) as error:
        # An OSError reaches the driver as one sentence.
        raise OSError(f"column {column.name!r} {error}") from error


def _describe_nulls(name: str, nulls: int, rows: int) -> str:
    return (
        f"column {name!r} has nulls in {nulls} of {rows} rows, but an external table is read in place; fill "
        "or drop them and write the table again, or skip the rows with handleInvalid='skip' of fit(df)"
    )


def _folder_values(column: Column, given: Any, rows: Sequence[int]) -> Any:
    """Returns a partition column's value for each file as an Arrow array, or raises ValueError."""
    if given.null_count:
        nulls = sum(n for n, value in zip(rows, given, strict=True) if not value.is_valid)
        raise ValueError(_describe_nulls(column.name, nulls, sum(rows)))
    is_number = pa.types.is_integer(given.type) or pa.types.is_floating(given.type)
    if isinstance(column.kind, Scalar) and is_number:
        given = given.cast(number_type(column.kind.dtype))
    if pa.types.is_floating(given.type) and not pc.all(pc.is_finite(given)).as_py():
        raise ValueError(
            f"partition column {column.name!r} is NaN or infinite in a folder; give it a finite value"
        )
    return given


def _splits(listing: Listing, validation_col: str | None) -> list[Split]:
    if validation_col is None:
        return ["train"] * len(listing.files)
    given = listing.folder_columns.get(validation_col)
    if given is None:
        raise ValueError(
            f"validation_col {validation_col!r} is a column of the files, but validation rows of "
            "an external table are whole files; name a partition column, or write the table with write_shards"
        )
    values = given.to_pylist()
    if other := sorted({str(value) for value in values if value not in (0, 1)}):
        raise ValueError(f"validation_col {validation_col!r} must be 0 or 1 in every folder, got {other[0]}")
    return ["validation" if value else "train" for value in values]


def _can_split(footer: Footer, window: int) -> bool:
    return all(cuts for rows, cuts in zip(footer.row_groups, footer.cuts, strict=True) if rows >= 2 * window)


def _check_unsplit(listing: Listing, footers: Sequence[Footer], window: int) -> None:
    uncut = []
    for (path, _, _), footer in zip(listing.files, footers, strict=True):
        can_be_cut = _can_split(footer, window)
        # With windows, only lists may be longer than the mean that determined the windows.
        sizes = footer.list_bytes if can_be_cut else footer.num_bytes
        for rows, num_bytes in zip(footer.row_groups, sizes, strict=True):
            if not can_be_cut or (rows < 2 * window and num_bytes > ROW_GROUP_BYTES):
                uncut.append((num_bytes, rows, path))
    held = sorted(uncut, reverse=True)[:_GROUPS_IN_USE]
    total = sum(num_bytes for num_bytes, _, _ in held)
    if total > MAX_UNSPLIT_BYTES:
        _, rows, path = held[0]
        raise ValueError(
            f"{storage.join(listing.source.uri, path)!r} has a row group of {rows} rows that readers "
            "cannot split, because its arrays have no page index or its rows differ much in length. With "
            f"such row groups, readers would hold {total >> 20} MiB. Write the table in smaller row groups, "
            "with Spark, with pyarrow and write_page_index=True, or with write_shards"
        )
