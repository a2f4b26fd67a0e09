"""`write_shards`: writes a DataFrame as Parquet shards in one pass.

A non-deterministic plan (`rand`, sampling) gives other rows each time it runs, so a single pass makes the
split, the statistics and the files. Each write has its own folder. The folder's name starts with an
underscore, so that tools that read whole folders skip it.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast, get_args

from ringspark.pipelines import storage
from ringspark.pipelines.column_stats import ColumnStats
from ringspark.pipelines.columns import (
    Column,
    check_batch,
    check_masks,
    check_names,
    columns_from_spark,
    is_case_sensitive,
    quote,
)
from ringspark.pipelines.fixed_rows import fix_rows
from ringspark.pipelines.folder_removal import FOLDER_PREFIX
from ringspark.pipelines.job_names import name_jobs
from ringspark.pipelines.kinds import Kind, Scalar, Vocabulary
from ringspark.pipelines.kinds.strings import fill_vocabulary
from ringspark.pipelines.local_python import choose_python
from ringspark.pipelines.manifest import SPLITS, ShardFile, ShardManifest
from ringspark.pipelines.spark_errors import explain_worker_errors
from ringspark.pipelines.spark_paths import resolve
from ringspark.pipelines.spark_plans import default_parallelism, estimate_bytes
from ringspark.pipelines.table_files import FileColumn, InPlaceError
from ringspark.pipelines.typed_json import record
from ringspark.pipelines.writing.commit import clean, commit, discard, previous_folders
from ringspark.pipelines.writing.rebalance import FILES_PER_CORE, copy_files, plan_even_files
from ringspark.pipelines.writing.references import REFERENCE_SQL, REFERENCES
from ringspark.pipelines.writing.row_counts import check_copies, check_rows, check_tasks
from ringspark.pipelines.writing.shard_writer import REPORT_SCHEMA, HandleInvalid, WritePlan, write_structs
from ringspark.pipelines.writing.split import check_indicator, split_expression
from ringspark.pipelines.writing.task_reports import Report, join_reports

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame, SparkSession

COMPRESSIONS = ("zstd", "snappy", "lz4", "gzip", "none")

_logger = logging.getLogger(__name__)

# Starting Python takes longer than writing so few rows, so a task writes several partitions.
_SMALL_TABLE_BYTES = 32 << 20
_MIN_TASKS = 64
# Temporary columns: computed values, whether a row is for validation, and whether it is written.
_MADE, _CHOSEN, _VALID = "__ringspark_made", "__ringspark_chosen", "__ringspark_valid"

MAX_WORDS = 1_000_000
"""Largest number of words of a vocabulary that has no `max_size`."""


def write_shards(
    df: DataFrame,
    uri: str,
    *,
    num_files: int | None = None,
    row_group_rows: int | None = None,
    compression: str = "zstd",
    columns: Mapping[str, Kind] | None = None,
    handle_invalid: HandleInvalid | Mapping[str, HandleInvalid] = "error",
    validation_col: str | None = None,
    validation_fraction: float | None = None,
    seed: int = 0,
    overwrite: bool = False,
    imports: Sequence[str] = (),
    references: dict[str, FileColumn] | None = None,
    valid: SparkColumn | None = None,
) -> ShardManifest:
    """Writes all columns of `df` as shards and commits their manifest. Runs on the driver.

    Args:
        df: The rows. Columns may be numbers, booleans, dates, timestamps, structs of these, arrays and ML
            vectors; strings and bytes need a choice in `columns`.
        uri: Folder that driver and executors can reach, on any store that fsspec supports. Spark resolves a
            path without a scheme; the manifest has the complete URI.
        num_files: Number of files per split, of even size. By default there is one per partition of `df`; if
            the partitions are skewed, or many and tiny, their rows are redistributed.
        row_group_rows: Rows per row group. By default as many as fit in 4 MiB, but at most 32,768.
        compression: One of `COMPRESSIONS`.
        columns: Column types by column name, for columns that need a choice or another type than the default:
            `Vocabulary()` or `HashBuckets(n)` for strings, `Tokens.of(tokenizer)` for texts, `Padded()` or
            `Ragged()` for arrays of varying length, `Sparse()` to keep vectors sparse, `Vector("float64")`,
            `Image(height, width)` for images, `Binary("npy", shape=...)`.
        handle_invalid: How to treat nulls, for all columns or by column name. "error" refuses the write.
            "skip" drops the row and counts it. "keep" stores zero (or an empty list) and adds a boolean
            column `<name>.isnull`. Images that cannot be decoded are dropped by "skip" and refused by "error"
            and "keep".
        validation_col: Boolean or 0/1 column. Rows for which it is true go to the "validation" split. The
            column is not stored.
        validation_fraction: Share of the rows that go to the "validation" split, instead of `validation_col`.
            A hash of (seed, column names, row) chooses them, so equal rows go to the same split, and a row
            keeps its split when the data grows. To split a split again, use another seed.
        seed: Seed of the hash of `validation_fraction`.
        overwrite: Whether to replace shards in `uri`. Readers see the old shards until the new ones are
            complete.
        imports: Modules that the Python workers import during the write, because a later stage needs them.
            Missing modules are skipped.
        references: Columns of `find_scan` that stay in the Parquet files below `df`. The shards then refer
            to the rows of these files, which must not change as long as the shards are read.
        valid: Condition. Rows for which it is not true are left out, and counted as skipped.

    Returns:
        The committed manifest.

    Raises:
        InPlaceError: The files below `df` hold other values than `df`.
        ValueError: A column has an unsupported type, or holds nulls or arrays of several lengths. Or there
            are no training rows, or `uri` cannot be written, or it holds shards already. No files are left
            behind.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.types import StructType

    for name, value in (("num_files", num_files), ("row_group_rows", row_group_rows)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if compression not in COMPRESSIONS:
        raise ValueError(f"compression must be one of {', '.join(COMPRESSIONS)}, got {compression!r}")
    check_batch(df, "write_shards")
    choose_python(df.sparkSession)
    exact = is_case_sensitive(df.sparkSession)
    check_names(name if exact else name.lower() for name in df.columns)
    for name in df.columns:
        if name.lower().startswith((_MADE, _CHOSEN, _VALID)):
            raise ValueError(f"column {name!r} starts like a temporary column of ringspark; rename it")
    if columns is not None and not isinstance(columns, Mapping):
        raise ValueError(f"columns must map names to column types, e.g. {{'x': Padded()}}, got {columns!r}")
    chosen = split_expression(df, columns, validation_col, validation_fraction, seed)
    stored = [field for field in df.schema.fields if field.name != validation_col]
    if not stored:
        raise ValueError("there is no column to write; select at least one besides validation_col")
    found = columns_from_spark(StructType(stored), columns)
    check_masks([column.name for column in found])
    if references is not None:
        found += REFERENCES
    resolved = resolve(df.sparkSession, uri)
    plan = WritePlan(
        uri=storage.normalize(resolved),
        folder=f"{FOLDER_PREFIX}{uuid.uuid4().hex[:12]}",
        columns=found,
        handle_invalid=_handling(handle_invalid, found),
        splits=chosen is not None,
        filters=valid is not None,
        row_group_rows=row_group_rows,
        compression=compression,
        imports=tuple(imports),
        references=references,
    )
    check_names([name for column in plan.stored_columns for name in column.kind.stored(column.name)])
    check_names([name for column in plan.stored_columns for name in column.kind.batch_names(column.name)])
    previous = previous_folders(plan.uri, overwrite)
    storage.check_writable(plan.uri)
    if any(must_learn(column) for column in plan.columns):
        # A separate job counts the words. It must see the rows and the split of the write.
        df = fix_rows(df) if references is None else df
        seen = df if chosen is None else df.where(~F.coalesce(chosen.cast("boolean"), F.lit(False)))
        seen = seen if valid is None else seen.where(valid)
        plan = replace(plan, columns=tuple(learn(seen, column) for column in plan.columns))
    manifest = _write(df, plan, chosen, valid, validation_col, num_files, overwrite)
    clean(manifest, plan.folder, previous)
    if plan.splits and not manifest.select("validation").num_rows:
        _logger.warning(
            "%r has no validation rows; to split a part of an earlier split, use another seed", plan.uri
        )
    return replace(manifest, uri=resolved)


def _write(
    df: DataFrame,
    plan: WritePlan,
    chosen: SparkColumn | None,
    valid: SparkColumn | None,
    validation_col: str | None,
    num_files: int | None,
    overwrite: bool,
) -> ShardManifest:
    is_new = not storage.exists(plan.uri)
    storage.make_dirs(storage.join(plan.uri, plan.folder))
    try:
        with explain_worker_errors():
            reports = _run(df, plan, chosen, valid)
            _check_reports(plan, reports, validation_col)
            check_tasks(reports)
            files = _even(df.sparkSession, plan, reports, num_files)
        manifest = join_reports(plan, reports, files)
        check_rows(manifest, reports)
        if plan.references is not None:
            manifest = _without_references(manifest, plan.references)
        commit(manifest, overwrite)
    except storage.BrokenOffError:
        raise  # its files belong to the manifest that the message names
    except BaseException:
        discard(plan.uri, plan.folder, is_new)
        raise
    return manifest


def _without_references(manifest: ShardManifest, file_columns: dict[str, FileColumn]) -> ShardManifest:
    """Removes the references from the columns, because they are in no batch."""
    columns = manifest.columns[: -len(REFERENCES)]
    names = [column.name for column in columns]
    stats = {split: {name: found[name] for name in names} for split, found in manifest.stats.items()}
    return replace(manifest, columns=columns, stats=stats, file_columns=file_columns)


def _handling(
    asked: HandleInvalid | Mapping[str, HandleInvalid], columns: Sequence[Column]
) -> tuple[HandleInvalid, ...]:
    names = [column.name for column in columns]
    given = dict.fromkeys(names, "error") | (
        dict.fromkeys(names, asked) if isinstance(asked, str) else dict(asked)
    )
    for name, value in given.items():
        if name not in names:
            raise ValueError(f"handle_invalid names {name!r}, not a column to write; remove it")
        if value not in get_args(HandleInvalid):
            raise ValueError(
                f"handle_invalid for column {name!r} must be one of {', '.join(get_args(HandleInvalid))}, "
                f"got {value!r}"
            )
    return cast("tuple[HandleInvalid, ...]", tuple(given.values()))


def must_learn(column: Column) -> bool:
    """Returns whether the words of a column's vocabulary must be counted in the training rows."""
    return isinstance(column.kind, Vocabulary) and column.kind.words is None


def learn(df: DataFrame, column: Column) -> Column:
    """Counts the words of a vocabulary in `df`, the training rows. Runs a Spark job if `must_learn`."""
    from pyspark.sql import functions as F

    if not isinstance(column.kind, Vocabulary) or column.kind.words is not None:
        return column
    # The cast drops the collation, because strings with different bytes get different ids.
    source = F.col(quote(column.name)).cast("string")
    counted = df.where(source.isNotNull()).groupBy(source.alias("word")).agg(F.count("*").alias("rows"))
    if column.kind.min_count > 1:
        counted = counted.where(F.col("rows") >= column.kind.min_count)
    if column.kind.max_size is None:
        # The driver and the manifest hold all words.
        counted = counted.limit(MAX_WORDS + 1)
    else:
        counted = counted.orderBy(F.desc("rows"), "word").limit(column.kind.max_size)
    with explain_worker_errors():
        counts = [(row["word"], row["rows"]) for row in counted.collect()]
    if column.kind.max_size is None and len(counts) > MAX_WORDS:
        raise ValueError(
            f"column {column.name!r} has more than {MAX_WORDS:,} different strings; keep the most frequent "
            "with Vocabulary(max_size=100_000), or use HashBuckets(100_000)"
        )
    return replace(column, kind=fill_vocabulary(column.kind, counts))


def _run(
    df: DataFrame, plan: WritePlan, chosen: SparkColumn | None, valid: SparkColumn | None
) -> list[Report]:
    from pyspark.sql import functions as F

    types = {field.name: field.dataType for field in df.schema.fields}
    columns = [column for column in plan.columns if column.name in types]
    made = {
        f"{_MADE}{index}": column.kind.select(F.col(quote(column.name)), types[column.name])
        for index, column in enumerate(columns)
        if type(column.kind) is not Scalar or column.source.startswith("decimal")
    }
    names = [f"{_MADE}{index}" for index in range(len(columns))]
    texts = [
        name if name in made else quote(column.name) for name, column in zip(names, columns, strict=True)
    ]
    texts += REFERENCE_SQL if plan.references is not None else ()
    for name, added in ((_CHOSEN, chosen), (_VALID, valid)):
        if added is not None:
            made[name] = added
            texts.append(name)
    # One column and SQL text, because Spark's client takes seconds for 1,000 columns.
    numbered = (f"{text} AS c{index}" for index, text in enumerate(texts))
    selected = (df.withColumns(made) if made else df).selectExpr(f"struct({', '.join(numbered)}) AS row")
    if estimate_bytes(df) <= _SMALL_TABLE_BYTES:
        # Without a shuffle; fewer partitions stay as they are. No expression may name a row's partition here:
        # Spark computes expressions over data in memory on the driver, where each row is in partition 0.
        selected = selected.coalesce(max(_MIN_TASKS, FILES_PER_CORE * _cores(df.sparkSession)))
    with name_jobs(df.sparkSession, f"write shards to {storage.redact(plan.uri)}"):
        rows = selected.mapInArrow(partial(write_structs, plan), REPORT_SCHEMA).collect()
    return [json.loads(row["report"]) for row in rows]


def _check_reports(plan: WritePlan, reports: Sequence[Report], validation_col: str | None) -> None:
    rows = sum(report["rows"] for report in reports)
    for index, (column, handling) in enumerate(zip(plan.columns, plan.handle_invalid, strict=True)):
        nulls = sum(report["nulls"][index] for report in reports)
        if nulls and handling == "error":
            raise ValueError(
                f"column {column.name!r} has nulls in {nulls} of {rows} rows; drop them first with "
                f"df.na.drop(subset=[{column.name!r}]), fill them, or skip the rows: "
                "handle_invalid='skip' of write_shards, handleInvalid='skip' of an estimator"
            )
    for report in reports:
        if report["problem"] is not None:
            raise (InPlaceError if report["differs"] else ValueError)(report["problem"])
    if validation_col is not None:
        indicator = ColumnStats()
        for report in reports:
            indicator = indicator.merge(ColumnStats(**report["indicator"]))
        check_indicator(validation_col, indicator, sum(report["indicator_nulls"] for report in reports))


def _even(
    spark: SparkSession, plan: WritePlan, reports: Sequence[Report], num_files: int | None
) -> list[ShardFile]:
    files = [record(ShardFile, file) for report in reports for file in report["files"]]
    files.sort(key=lambda file: file.path)
    kept: list[ShardFile] = []
    for split in SPLITS:
        written = [file for file in files if file.split == split]
        # References take little space, and are divided like copies of their rows.
        size = sum(report["value_bytes"][split] for report in reports)
        new = plan_even_files(written, num_files, size, partial(_cores, spark))
        if not new:
            kept += written
            continue
        numbers = spark.range(0, len(new), 1, len(new))
        with name_jobs(spark, f"make the files of {storage.redact(plan.uri)} even"):
            rows = numbers.mapInArrow(partial(copy_files, plan, split, new), REPORT_SCHEMA).collect()
        entries = {entry.pop("number"): entry for entry in (json.loads(row["report"]) for row in rows)}
        assert len(entries) == len(rows) == len(new)
        copies = [record(ShardFile, entries[number]) for number in range(len(new))]
        check_copies(written, copies, [sum(part.stop - part.start for part in ranges) for ranges in new])
        kept += copies
    return kept


def _cores(spark: SparkSession) -> int:
    return default_parallelism(spark) or 1
