"""Lists the files of a version of a Delta table, using the package `deltalake`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa

from ringspark.pipelines import storage
from ringspark.pipelines.external.listing import Listing
from ringspark.pipelines.reuse.source_files import path_states
from ringspark.pipelines.spark_paths import resolve
from ringspark.pipelines.table_files import TableSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def list_delta(spark: SparkSession, uri: str, version: int | None = None) -> Listing:
    """Lists the files of a version of a Delta table; the newest version by default.

    Raises:
        ValueError: The table or the version does not exist, a file was removed, the table has deletion
            vectors or column mapping, or `deltalake` is not installed.
    """
    from pyspark.sql.types import StructType

    root = storage.normalize(resolve(spark, uri))
    table = _open_table(root, version)
    _check_features(root, table)
    actions = pa.table(table.get_add_actions(flatten=True)).sort_by("path")
    names = [unquote(name) for name in actions.column("path").to_pylist()]
    if outside := [name for name in names if "://" in name or name.startswith("/")]:
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
    schema = table.schema().to_json()
    return Listing(
        source=TableSource(uri=root, format="delta", version=table.version()),
        schema=StructType.fromJson(json.loads(schema) if isinstance(schema, str) else schema),
        files=tuple((name, size, marks) for name, (_, size, marks) in zip(names, states, strict=True)),
        folder_columns={
            name: actions.column(f"partition.{name}").combine_chunks()
            for name in table.metadata().partition_columns
        },
    )


def _open_table(root: str, version: int | None) -> Any:
    try:
        from deltalake import DeltaTable
    except ImportError:
        raise ValueError("Delta tables need the package deltalake; pip install 'ringspark[delta]'") from None
    if storage.is_local(root) and not storage.exists(root):
        raise ValueError(f"there is no folder {root!r}; pass a folder that holds a Delta table")
    try:
        return DeltaTable(root, version=version)
    except Exception as error:  # deltalake raises many classes
        which = "" if version is None else f" of version {version}"
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(
            f"{root!r} cannot be read as a Delta table{which} ({reason}); pass the folder that holds "
            "_delta_log, and a version of its history"
        ) from error


def _check_features(root: str, table: Any) -> None:
    mapping = table.metadata().configuration.get("delta.columnMapping.mode", "none")
    if mapping != "none":
        raise ValueError(
            f"Delta table {root!r} uses column mapping (mode {mapping!r}), so its files have other column "
            "names; write it with write_shards"
        )
    if "deletionVectors" not in (table.protocol().reader_features or ()):
        return
    try:
        holds_deleted = pa.table(table.deletion_vectors()).num_rows > 0
    except Exception:  # deltalake cannot read an existing deletion vector
        holds_deleted = True
    if holds_deleted:
        raise ValueError(
            f"Delta table {root!r} has deletion vectors, so its files hold deleted rows; rewrite them "
            "(REORG TABLE ... APPLY (PURGE)), or write the table with write_shards"
        )
