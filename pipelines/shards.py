"""`write_shards`: a DataFrame becomes Parquet shards, in one pass, committed last.

One pass matters twice. A plan that is not deterministic (`rand`, sampling, an
unstable order) gives other rows each time it runs, so a split made by two
writes can put a row on both sides or on neither; here each row is seen once and
goes to exactly one file. And statistics and row counts come from the very rows
that were written. Only the DataFrame API is used: Spark Connect works too.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ringspark.pipelines import storage
from ringspark.pipelines.columns import Column, columns_from_spark, select_expression
from ringspark.pipelines.manifest import MANIFEST_NAME, SPLITS, ShardFile, ShardManifest
from ringspark.pipelines.shard_writer import REPORT_SCHEMA, WritePlan, write_partition
from ringspark.pipelines.spark_errors import python_workers
from ringspark.pipelines.stats import ColumnStats

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COMPRESSIONS = ("zstd", "snappy", "lz4", "gzip", "none")

_logger = logging.getLogger(__name__)

_Stats = dict[str, dict[str, ColumnStats]]


def write_shards(
    df: DataFrame,
    uri: str,
    *,
    num_files: int | None = None,
    row_group_rows: int | None = None,
    compression: str = "zstd",
    validation_col: str | None = None,
    overwrite: bool = False,
) -> ShardManifest:
    """Writes every column of `df` as shards and commits their manifest. Runs on the driver.

    Args:
        df: Columns of numbers, booleans, arrays of them, or ML vectors (stored as float32 arrays).
        uri: Folder that driver and executors share; anything fsspec reaches.
        num_files: Files per split, filled evenly; by default one per core of the cluster.
        row_group_rows: Rows per row group. By default 16,384, or what fits 4 MiB if that is less.
        compression: One of `COMPRESSIONS`.
        validation_col: Boolean or 0/1 column; rows where it is true go to the "validation"
            split. The column itself is not stored.
        overwrite: Replace the shards in `uri`. Readers see the old ones until the new are complete.

    Returns:
        The committed manifest.

    Raises:
        ValueError: A column cannot be trained on, holds nulls or arrays of several lengths, there
            are no training rows, or `uri` cannot be written or holds shards already. Nothing is
            left behind.
    """
    for name, value in (("num_files", num_files), ("row_group_rows", row_group_rows)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if compression not in COMPRESSIONS:
        raise ValueError(f"compression must be one of {', '.join(COMPRESSIONS)}, got {compression!r}")
    if df.isStreaming:
        raise ValueError("write_shards takes a batch DataFrame, got a streaming one; call it in foreachBatch")
    schema = df.schema
    all_columns = columns_from_spark(schema)
    columns = _stored_columns(all_columns, validation_col)
    uri = storage.normalize(uri)
    previous = _previous(uri, overwrite)
    storage.check_writable(uri)
    is_new = not storage.exists(uri)
    storage.make_dirs(uri)

    plan = WritePlan(
        uri=uri,
        run_id=uuid.uuid4().hex[:12],
        columns=columns,
        validation_col=validation_col,
        row_group_rows=row_group_rows,
        compression=compression,
    )
    ordered = [*columns, *(column for column in all_columns if column.name == validation_col)]
    types = {field.name: field.dataType for field in schema.fields}
    # Numbered names: Spark Connect takes a dot in a name of mapInArrow's input for a struct field.
    selected = df.select(
        [select_expression(c, types[c.name]).alias(f"c{index}") for index, c in enumerate(ordered)]
    )
    spread = selected.repartition(num_files or _default_parallelism(df.sparkSession))
    try:
        with python_workers():
            rows = spread.mapInArrow(partial(write_partition, plan), REPORT_SCHEMA).collect()
        manifest = _manifest(plan, [json.loads(row["report"]) for row in rows])
        _commit(manifest, overwrite)
    except BaseException:
        _remove_files(uri, _run_files(plan))
        if is_new:
            storage.remove_if_empty(uri)
        raise
    keep = {file.path for file in manifest.files}
    # Files of attempts whose report never arrived, and the shards that were replaced.
    _remove_files(uri, [*(n for n in _run_files(plan) if n not in keep), *previous])
    return manifest


def _stored_columns(columns: Sequence[Column], validation_col: str | None) -> tuple[Column, ...]:
    stored = tuple(column for column in columns if column.name != validation_col)
    if validation_col is not None:
        if len(stored) == len(columns):
            known = ", ".join(column.name for column in columns)
            raise ValueError(f"validation_col {validation_col!r} is not a column; known: {known}")
        indicator = next(column for column in columns if column.name == validation_col)
        if indicator.kind != "scalar":
            raise ValueError(f"validation_col {validation_col!r} must be boolean or 0/1, got an array column")
    if not stored:
        raise ValueError("there is no column to write; select at least one besides validation_col")
    return stored


def _previous(uri: str, overwrite: bool) -> list[str]:
    """Returns the files of the shards that `uri` holds now."""
    if not storage.exists(storage.join(uri, MANIFEST_NAME)):
        return []
    if not overwrite:
        raise ValueError(f"{uri!r} holds shards already; choose another folder or pass overwrite=True")
    try:
        return [file.path for file in ShardManifest.load(uri).files]
    except ValueError as error:
        _logger.warning("the shards in %r are replaced, their files are left there: %s", uri, error)
        return []


def _default_parallelism(spark: SparkSession) -> int:
    """Returns the cores of the cluster, also through Spark Connect, which has no SparkContext."""
    from pyspark.sql import functions as F

    # spark.range uses the default parallelism, so its partitions can be counted: a job of milliseconds.
    return max(1, spark.range(1 << 14).select(F.spark_partition_id()).distinct().count())


def _manifest(plan: WritePlan, reports: Sequence[dict[str, Any]]) -> ShardManifest:
    """Joins the reports of all tasks; ValueError if the data cannot be trained on."""
    stats: _Stats = {}
    for split in SPLITS:
        merged = {column.name: ColumnStats() for column in plan.columns}
        for report in reports:
            for name, part in report["stats"][split].items():
                merged[name] = merged[name].merge(ColumnStats.from_json(part))
        if split == "train" or merged[plan.columns[0].name].rows:
            stats[split] = merged
    if plan.validation_col is not None:
        indicator = ColumnStats()
        for report in reports:
            indicator = indicator.merge(ColumnStats.from_json(report["indicator"]))
        _check_indicator(plan.validation_col, indicator)
    columns = tuple(
        _checked_column(column, [part[column.name] for part in stats.values()]) for column in plan.columns
    )
    if not stats["train"][columns[0].name].rows:
        where = "" if plan.validation_col is None else f" (every row has {plan.validation_col!r} true)"
        raise ValueError(f"the DataFrame has no training rows{where}; nothing was written")
    files = [
        ShardFile(**{**file, "row_groups": tuple(file["row_groups"])}) for r in reports for file in r["files"]
    ]
    files.sort(key=lambda file: (SPLITS.index(file.split), file.path))
    return ShardManifest(uri=plan.uri, columns=columns, files=tuple(files), stats=stats)


def _checked_column(column: Column, parts: Sequence[ColumnStats]) -> Column:
    """Returns the column with its array length, from the statistics of all splits."""
    stats = ColumnStats()
    for part in parts:
        stats = stats.merge(part)
    if stats.nulls:
        raise ValueError(
            f"column {column.name!r} has {stats.nulls} nulls in {stats.rows} rows; fill or drop them first, "
            "e.g. with pyspark.ml.feature.Imputer or df.na.drop"
        )
    if column.kind == "scalar":
        return column
    if stats.min_length != stats.max_length:
        raise ValueError(
            f"column {column.name!r} has arrays of {stats.min_length} to {stats.max_length} elements; "
            "every row needs the same number, pad or cut them first"
        )
    if stats.min_length == 0:
        raise ValueError(f"column {column.name!r} holds only empty arrays; drop it with df.drop")
    return replace(column, length=stats.min_length)


def _check_indicator(name: str, stats: ColumnStats) -> None:
    if stats.nulls or stats.nans:
        raise ValueError(
            f"validation_col {name!r} has {stats.nulls + stats.nans} nulls or NaNs in {stats.rows} rows; "
            "fill them with df.na.fill first"
        )
    if stats.infs or (stats.values and not (stats.minimum in (0, 1) and stats.maximum in (0, 1))):
        raise ValueError(
            f"validation_col {name!r} must be boolean or 0/1, "
            f"got values from {stats.minimum} to {stats.maximum}"
        )


def _commit(manifest: ShardManifest, overwrite: bool) -> None:
    for file in manifest.files:
        if not storage.exists(storage.join(manifest.uri, file.path)):
            raise ValueError(
                f"the driver does not see {file.path!r} that an executor wrote to {manifest.uri!r}; "
                "use storage that driver and executors share"
            )
    if not overwrite and storage.exists(storage.join(manifest.uri, MANIFEST_NAME)):
        raise ValueError(
            f"another writer has put shards into {manifest.uri!r} meanwhile; choose another folder"
        )
    manifest.save()


def _run_files(plan: WritePlan) -> list[str]:
    """Names of all files that any task attempt of this write has left in the folder."""
    return [name for name in storage.list_names(plan.uri) if plan.run_id in name]


def _remove_files(uri: str, names: Sequence[str]) -> None:
    """Removes files, best effort: the data is right without it, and an error here must not hide another."""
    for name in names:
        try:
            storage.remove(storage.join(uri, name))
        except OSError as error:
            _logger.warning("could not remove %r from %r: %s", name, uri, error)
