"""Lists the files of a version of a Delta table, using the package `deltalake`.

The package decodes deletion vectors and partition values. If a table has a reader feature that is not in
`_FEATURES`, `list_delta` refuses it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from ringspark.extras.external_tables.delta_log import copy_log, find_version, restore_types
from ringspark.extras.external_tables.in_place.file_scan import FIELD_ID, MAPPED_ID, PHYSICAL
from ringspark.extras.external_tables.in_place.listing import Int64Array, Listing
from ringspark.pipelines import storage
from ringspark.pipelines.spark_paths import resolve
from ringspark.pipelines.table_files import TableSource, path_states

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructField, StructType

# Reader features that this module handles. The variant type does not change columns of other types.
_FEATURES = {
    "columnMapping", "deletionVectors", "timestampNtz", "typeWidening", "typeWidening-preview",
    "v2Checkpoint", "vacuumProtocolCheck", "variantType", "variantType-preview",
}  # fmt: skip
_MAPPING = "delta.columnMapping.mode"


def list_delta(spark: SparkSession, uri: str, version: int | str | TableSource | None = None) -> Listing:
    """Lists the files of a version of a Delta table.

    Args:
        version: Number of the version, or a time such as "2026-11-27 12:00:00" in Spark's time zone, which
            means the newest version at that time. An earlier listing's source means its version. None is the
            newest version.

    Raises:
        ValueError: The table or the version does not exist, a file was removed, the table has a feature that
            cannot be read exactly, or `deltalake` is not installed.
    """
    root = storage.normalize(resolve(spark, uri))
    if isinstance(version, TableSource):
        version = version.version
    with ExitStack() as stack:
        return _list_table(spark, root, _open_table(spark, root, version, stack))


def _list_table(spark: SparkSession, root: str, table: Any) -> Listing:
    from pyspark.sql.types import StructType

    _check_features(root, table)
    actions = pa.table(table.get_add_actions(flatten=True)).sort_by("path")
    names = [unquote(name) for name in actions.column("path").to_pylist()]
    if outside := [name for name in names if "://" in name or name.startswith(("/", "file:"))]:
        raise ValueError(
            f"Delta table {root!r} has the file {outside[0]!r} of another table (a shallow clone); write it "
            "with write_shards"
        )
    try:
        states = path_states([storage.join(root, name) for name in names])
    except FileNotFoundError as error:
        raise ValueError(
            f"Delta table {root!r} lacks a file of its version {table.version()} ({error}), perhaps "
            "because of a VACUUM; pass a newer version"
        ) from None
    if not names:
        raise ValueError(f"Delta table {root!r} has no rows in version {table.version()}; pass another")
    fields = json.loads(table.schema().to_json())
    if "ringspark.type" in str(fields):
        fields = restore_types(fields)
    schema = StructType.fromJson(fields)
    folders, settings = table.metadata().partition_columns, table.metadata().configuration
    return Listing(
        source=TableSource(uri=root, format="delta", version=table.version()),
        schema=schema,
        files=tuple((name, size, marks) for name, (_, size, marks) in zip(names, states, strict=True)),
        folder_columns={
            name: _partition_values(spark, schema[name], actions.column(f"partition.{name}").combine_chunks())
            for name in folders
        },
        deleted=_deleted_rows(root, table, names),
        file_schema=_file_schema(schema, folders, settings.get(_MAPPING, "none")),
    )


def _open_table(spark: SparkSession, root: str, version: int | str | None, stack: ExitStack) -> Any:
    """Returns the table of `deltalake`; a copy of its log lasts as long as `stack`."""
    try:
        from deltalake import DeltaTable
    except ImportError:
        raise ValueError("Delta tables need the package deltalake; pip install 'ringspark[delta]'") from None
    if storage.is_local(root) and not storage.exists(root):
        raise ValueError(f"there is no folder {root!r}; pass a folder that holds a Delta table")
    if isinstance(version, str):
        number: int | None = find_version(root, parse_time(spark, version))
    else:
        number = version

    def open_copy() -> Any:
        return DeltaTable(stack.enter_context(copy_log(root)), version=number)

    try:
        # deltalake would open the folder `unquote(root)`.
        if storage.is_local(root) and unquote(root) != root:
            return open_copy()
        try:
            table = DeltaTable(root, version=number)
        except Exception as error:
            if "Unsupported Delta table type" not in str(error):
                raise
            return open_copy()
        types = {field.name: str(field.type) for field in table.schema().fields}
        times = [name for name in table.metadata().partition_columns if '"timestamp"' in types[name]]
        return open_copy() if times and spark.conf.get("spark.sql.session.timeZone") != "UTC" else table
    except Exception as error:  # deltalake raises many classes
        which = "" if version is None else f" of version {version}"
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(
            f"{root!r} cannot be read as a Delta table{which} ({reason}); pass the folder that holds "
            "_delta_log, and a version of its history"
        ) from error


def parse_time(spark: SparkSession, text: str) -> datetime:
    """Returns the moment that a text means in Spark's time zone, or raises ValueError."""
    from pyspark.sql import functions as F

    row = spark.range(1).select(F.unix_micros(F.expr(f"try_cast({json.dumps(text)} AS timestamp)"))).first()
    if row is None or row[0] is None:
        raise ValueError(
            f"version must be a number or a time such as '2026-11-27 12:00:00', got {text!r}; pass one"
        )
    return datetime.fromtimestamp(0, timezone.utc) + timedelta(microseconds=row[0])


def _partition_values(spark: SparkSession, field: StructField, values: Any) -> Any:
    """Returns the values of a partition column; Spark parses timestamps that are texts."""
    if field.dataType.typeName() != "timestamp" or pa.types.is_timestamp(values.type):
        return values
    rows = [(text,) for text in values.unique().drop_null().to_pylist()]
    frame = spark.createDataFrame(rows, "text string")
    moments: dict[str, int] = dict(frame.selectExpr("text", "unix_micros(cast(text AS timestamp))").collect())
    return pa.array([moments.get(text) for text in values.to_pylist()], pa.timestamp("us", "UTC"))


def _check_features(root: str, table: Any) -> None:
    unknown = sorted(set(table.protocol().reader_features or ()) - _FEATURES)
    if '"delta.typeChanges"' in table.schema().to_json():
        unknown.append("typeWidening")
    if unknown:
        raise ValueError(
            f"Delta table {root!r} uses the feature {unknown[0]!r}, which ringspark cannot read exactly; "
            "write it with write_shards"
        )


def _deleted_rows(root: str, table: Any, names: Sequence[str]) -> dict[str, Int64Array]:
    if "deletionVectors" not in (table.protocol().reader_features or ()):
        return {}
    base, deleted = unquote(table.table_uri).rstrip("/") + "/", {}
    try:
        vectors = pa.table(table.deletion_vectors())
        for file, kept in zip(vectors.column("filepath"), vectors.column("selection_vector"), strict=True):
            # A vector may end after the last deleted row.
            keeps = kept.values.to_numpy(zero_copy_only=False)
            deleted[unquote(file.as_py()).removeprefix(base)] = np.flatnonzero(~keeps)
    except Exception as error:  # deltalake raises many classes, and old ones lack the method
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(
            f"the deletion vectors of Delta table {root!r} cannot be read ({reason}); update deltalake, or "
            "rewrite the files (REORG TABLE ... APPLY (PURGE))"
        ) from error
    if strange := deleted.keys() - set(names):
        raise ValueError(
            f"deltalake reports deleted rows of {min(strange)!r}, which {root!r} does not list; update it"
        )
    return {name: rows for name, rows in deleted.items() if len(rows)}


def _file_schema(schema: StructType, folders: Sequence[str], mode: str) -> StructType | None:
    """Returns the schema of the files. Column mapping keeps their names and field IDs in the metadata."""
    if mode == "none":
        return None

    def rename(node: Any) -> Any:
        if isinstance(node, list):
            return [rename(each) for each in node]
        if not isinstance(node, dict) or node.get("type") == "udt":
            return node
        metadata = node.get("metadata", {})
        node = {key: rename(value) for key, value in node.items() if key != "metadata"}
        if "name" in node:
            ids = {FIELD_ID: metadata[MAPPED_ID]} if mode == "id" else {}
            node |= {"name": metadata.get(PHYSICAL, node["name"]), "metadata": ids}
        return node

    files = type(schema)([field for field in schema.fields if field.name not in folders])
    renamed: StructType = type(schema).fromJson(rename(files.jsonValue()))
    return renamed
