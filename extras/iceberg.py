"""Lists the files of a snapshot of an Iceberg table, using the package `pyiceberg`.

The listing has the rows that position delete files and deletion vectors delete. Columns are found by the
field IDs in the files, so a renamed column keeps its values. Tables with equality deletes, or with default
values that are not in the files, are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ringspark.pipelines import storage
from ringspark.pipelines.external.delta import parse_time
from ringspark.pipelines.external.file_scan import FIELD_ID
from ringspark.pipelines.external.listing import Int64Array, Listing
from ringspark.pipelines.reuse.source_files import path_states
from ringspark.pipelines.table_files import TableSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_THREADS = 16
_SAME_TYPES = ("boolean", "long", "float", "double", "date", "string")
_OTHER_TYPES = {"int": "integer", "timestamp": "timestamp_ntz", "timestamptz": "timestamp"}


def list_iceberg(
    spark: SparkSession, parts: Sequence[str], version: int | str | None = None
) -> Listing | None:
    """Lists the files of a snapshot; returns None if pyiceberg's catalog `parts[0]` has no such table.

    Args:
        version: ID of a snapshot, or a time in Spark's time zone, which means the current snapshot at that
            time. None is the newest snapshot.

    Raises:
        ValueError: The snapshot does not exist or cannot be read exactly.
    """
    from pyspark.sql.types import StructType

    table = _load(parts)
    if table is None:
        return None
    name, current = ".".join(parts), table.current_snapshot()
    snapshot = current if version is None else _find_snapshot(spark, table, name, version)
    if snapshot is None:
        raise ValueError(f"Iceberg table {name!r} has no rows yet; write some first")
    # A column may have been renamed since the newest snapshot.
    scan = table.scan(snapshot_id=None if snapshot == current else snapshot.snapshot_id)
    tasks, root = _plan(scan, name), storage.normalize(table.location())
    paths = {storage.normalize(task.file.file_path): task for task in tasks}
    if not paths:
        raise ValueError(
            f"Iceberg table {name!r} has no rows in snapshot {snapshot.snapshot_id}; pass another snapshot"
        )
    _check_files(table, name, root, scan.projection(), paths)
    try:
        states = path_states(sorted(paths))
    except FileNotFoundError as error:
        raise ValueError(
            f"Iceberg table {name!r} lacks a file of its snapshot {snapshot.snapshot_id} ({error}), perhaps "
            "because the snapshot has expired; pass a newer one"
        ) from None
    fields = [_spark_field(field) for field in scan.projection().fields]
    # Spark takes the type of a column from the wrong one if a file has another column of its name.
    stored = [field | {"name": f"parquet field {field['metadata'][FIELD_ID]}"} for field in fields]
    prefix = f"{root}/"
    return Listing(
        source=TableSource(uri=root, format="iceberg", version=snapshot.snapshot_id),
        schema=StructType.fromJson({"type": "struct", "fields": [_without_ids(field) for field in fields]}),
        files=tuple((path.removeprefix(prefix), size, marks) for path, size, marks in states),
        folder_columns={},
        deleted={path.removeprefix(prefix): rows for path, rows in _deleted_rows(table, name, paths).items()},
        file_schema=StructType.fromJson({"type": "struct", "fields": stored}),
    )


def _load(parts: Sequence[str]) -> Any:
    """Returns pyiceberg's table, or None."""
    from pyiceberg.catalog import load_catalog
    from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

    if len(parts) < 3:
        return None
    try:
        catalog = load_catalog(parts[0])
    except ValueError:  # the configuration lacks the catalog
        return None
    try:
        return catalog.load_table(tuple(parts[1:]))
    except (NoSuchTableError, NoSuchNamespaceError):
        return None


def _find_snapshot(spark: SparkSession, table: Any, name: str, version: int | str) -> Any:
    if isinstance(version, str):
        moment = parse_time(spark, version)
        found = table.snapshot_as_of_timestamp(int(moment.timestamp() * 1000))
    else:
        found = table.snapshot_by_id(version)
    if found is None:
        known = [snapshot.snapshot_id for snapshot in table.snapshots()][-3:]
        raise ValueError(f"Iceberg table {name!r} has no snapshot {version!r}; its newest ones are {known}")
    return found


def _plan(scan: Any, name: str) -> list[Any]:
    try:
        return list(scan.plan_files())
    except (ValueError, NotImplementedError) as error:
        if "equality deletes" not in str(error):
            raise
        raise ValueError(
            f"Iceberg table {name!r} has equality deletes, which only a query engine applies; rewrite its "
            "files (CALL system.rewrite_data_files), or use fit(df)"
        ) from None


def _check_files(table: Any, name: str, root: str, schema: Any, paths: dict[str, Any]) -> None:
    """Raises ValueError if values are not in the files, or a file is not in the table's folder."""
    if outside := [path for path in paths if not path.startswith(f"{root}/")]:
        raise ValueError(
            f"Iceberg table {name!r} has the file {outside[0]!r} outside of its folder {root!r}; use fit(df)"
        )
    formats = {str(task.file.file_format).rpartition(".")[2] for task in paths.values()} - {"PARQUET"}
    if formats:
        raise ValueError(
            f"Iceberg table {name!r} has files in the format {min(formats)}, not Parquet; use fit(df)"
        )
    if defaults := [field.name for field in schema.fields if field.initial_default is not None]:
        raise ValueError(
            f"column {defaults[0]!r} of Iceberg table {name!r} has a default value in older files; rewrite "
            "the files, or use fit(df)"
        )
    if "schema.name-mapping.default" in table.properties:
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="ringspark-footer") as pool:
            for path, has_ids in zip(paths, pool.map(_has_ids, paths), strict=True):
                if not has_ids:
                    raise ValueError(
                        f"Iceberg table {name!r} has the file {path!r} without field IDs; "
                        "rewrite the table's files, or use fit(df)"
                    )


def _has_ids(path: str) -> bool:
    with storage.store_errors(path), storage.open_file(path) as source:
        return all(b"PARQUET:field_id" in (field.metadata or {}) for field in pq.read_schema(source))


def _deleted_rows(table: Any, name: str, paths: dict[str, Any]) -> dict[str, Int64Array]:
    known: dict[str, dict[str, Int64Array]] = {}
    deleted = {}
    for path, task in paths.items():
        rows = []
        for file in task.delete_files:
            if file.file_path not in known:
                known[file.file_path] = _read_deletes(table, name, file)
            if (found := known[file.file_path].get(task.file.file_path)) is not None:
                rows.append(found)
        if rows:
            deleted[path] = np.unique(np.concatenate(rows))
    return deleted


def _read_deletes(table: Any, name: str, file: Any) -> dict[str, Int64Array]:
    """Returns the rows that a delete file deletes, by data file."""
    kind = str(file.file_format).rpartition(".")[2]
    with table.io.new_input(file.file_path).open() as source:
        if kind == "PUFFIN":
            from pyiceberg.table.deletion_vector import deletion_vectors_from_puffin_file
            from pyiceberg.table.puffin import PuffinFile

            vectors: Iterable[Any] = deletion_vectors_from_puffin_file(PuffinFile(source.read()))
            return {each.referenced_data_file: each.to_vector().to_numpy() for each in vectors}
        if kind != "PARQUET":
            raise ValueError(f"Iceberg table {name!r} has deletes in the format {kind}; use fit(df)")
        found = pq.read_table(pa.BufferReader(source.read()), columns=["file_path", "pos"])
    paths = found.column("file_path").combine_chunks().dictionary_encode()
    numbers, rows = paths.indices.to_numpy(), found.column("pos").to_numpy()
    return {path: rows[numbers == number] for number, path in enumerate(paths.dictionary.to_pylist())}


def _spark_field(field: Any) -> dict[str, Any]:
    metadata = {FIELD_ID: field.field_id}
    return {"name": field.name, "type": _spark_type(field.field_type), "nullable": True, "metadata": metadata}


def _spark_type(iceberg_type: Any) -> Any:
    """Returns Spark's type as JSON; types that Spark lacks become "binary", which few column types accept."""
    if iceberg_type.is_struct:
        return {"type": "struct", "fields": [_spark_field(field) for field in iceberg_type.fields]}
    text = str(iceberg_type)
    if text.startswith("list<"):
        element = _spark_type(iceberg_type.element_type)
        return {"type": "array", "elementType": element, "containsNull": True}
    if text.startswith("map<"):
        key, value = _spark_type(iceberg_type.key_type), _spark_type(iceberg_type.value_type)
        return {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": True}
    if text.startswith("decimal"):
        return text.replace(" ", "")
    return text if text in _SAME_TYPES else _OTHER_TYPES.get(text, "binary")


def _without_ids(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_ids(each) for each in node]
    if not isinstance(node, dict):
        return node
    return {key: {} if key == "metadata" else _without_ids(value) for key, value in node.items()}
