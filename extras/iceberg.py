"""Lists the files of a snapshot of an Iceberg table, using the package `pyiceberg`.

The listing has the rows that position delete files and deletion vectors delete. Columns are found by the
field IDs in the files, so a renamed column keeps its values. Tables with equality deletes, or with files that
lack a column with a default value, are refused.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ringspark.extras.external_tables.in_place.delta import parse_time
from ringspark.extras.external_tables.in_place.file_scan import FIELD_ID
from ringspark.extras.external_tables.in_place.listing import Int64Array, Listing
from ringspark.pipelines import storage
from ringspark.pipelines.table_files import TableSource, path_states

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_logger = logging.getLogger(__name__)
_THREADS = 16
_SAME_TYPES = ("boolean", "long", "float", "double", "date", "string")
_OTHER_TYPES: dict[str, str | None] = {
    "int": "integer",
    "timestamp": "timestamp_ntz",
    "timestamptz": "timestamp",
    "unknown": "void",
}
_OTHER_TYPES |= dict.fromkeys(("time", "timestamp_ns", "timestamptz_ns"))


def list_iceberg(
    spark: SparkSession,
    parts: Sequence[str],
    version: int | str | TableSource | None = None,
    metadata: str | None = None,
) -> Listing | None:
    """Lists the files of a snapshot; returns None if pyiceberg's catalog `parts[0]` has no such table.

    Args:
        version: ID of a snapshot, or a time in Spark's time zone, which means the current snapshot at that
            time; the columns then have the snapshot's names. An earlier listing's source means its snapshot
            and names. None is the newest snapshot, with the names of today.
        metadata: URI of the table's metadata file, to use if pyiceberg has no such catalog.

    Raises:
        ValueError: The snapshot does not exist or cannot be read exactly.
    """
    from pyspark.sql.types import StructType

    table, name = _load(parts, metadata), ".".join(parts)
    if table is None:
        return None
    has_id = version is None or isinstance(version, TableSource)
    schema_id = None
    if isinstance(version, TableSource):
        schema_id, version = version.schema_id, version.version
    snapshot = table.current_snapshot() if version is None else _find_snapshot(spark, table, name, version)
    if snapshot is None:
        raise ValueError(f"Iceberg table {name!r} has no rows yet; write some first")
    scan = table.scan(snapshot_id=snapshot.snapshot_id)
    columns = table.schemas().get(schema_id, table.schema()) if has_id else scan.projection()
    tasks, root = _plan(scan, name), storage.normalize(table.location())
    paths = {storage.normalize(task.file.file_path): task for task in tasks}
    if not paths:
        raise ValueError(
            f"Iceberg table {name!r} has no rows in snapshot {snapshot.snapshot_id}; pass another snapshot"
        )
    _check_files(name, root, paths)
    try:
        states = path_states(sorted(paths))
    except FileNotFoundError as error:
        raise ValueError(
            f"Iceberg table {name!r} lacks a file of its snapshot {snapshot.snapshot_id} ({error}), perhaps "
            "because the snapshot has expired; pass a newer one"
        ) from None
    _check_ids(name, columns, paths)
    schema, file_schema = (
        StructType.fromJson(_spark_type(columns.as_struct(), name_of)) for name_of in (_name, _name_by_id)
    )
    if left_out := [field.name for field in columns.fields if field.name not in schema.names]:
        _logger.warning("Spark does not read the types of %s in Iceberg table %r", left_out, name)
    prefix = f"{root}/"
    return Listing(
        source=TableSource(
            uri=root, format="iceberg", version=snapshot.snapshot_id, schema_id=columns.schema_id
        ),
        schema=schema,
        files=tuple((path.removeprefix(prefix), size, marks) for path, size, marks in states),
        folder_columns={},
        deleted={path.removeprefix(prefix): rows for path, rows in _deleted_rows(table, name, paths).items()},
        file_schema=file_schema,
    )


def _load(parts: Sequence[str], metadata: str | None) -> Any:
    """Returns pyiceberg's table, or None."""
    from pyiceberg.catalog import load_catalog
    from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError
    from pyiceberg.table import StaticTable

    catalog = None
    with suppress(ValueError):  # the configuration lacks the catalog
        catalog = load_catalog(parts[0]) if len(parts) > 2 else None
    try:
        if catalog is not None:
            with suppress(NoSuchTableError, NoSuchNamespaceError):
                return catalog.load_table(tuple(parts[1:]))
        return None if metadata is None else StaticTable.from_metadata(metadata)
    except Exception as error:  # pyiceberg raises many classes
        known = re.search(r"Unsupported field type: '[^']*'", str(error))
        reason = known[0] if known else next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(
            f"pyiceberg cannot read Iceberg table {'.'.join(parts)!r} ({reason}); drop a column of an "
            "unsupported type, or use fit(df)"
        ) from error


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


def _check_files(name: str, root: str, paths: dict[str, Any]) -> None:
    """Raises ValueError if a file is not in the table's folder, or is no Parquet file."""
    if outside := [path for path in paths if not path.startswith(f"{root}/")]:
        raise ValueError(
            f"Iceberg table {name!r} has the file {outside[0]!r} outside of its folder {root!r}; use fit(df)"
        )
    formats = {str(task.file.file_format).rpartition(".")[2] for task in paths.values()} - {"PARQUET"}
    if formats:
        raise ValueError(
            f"Iceberg table {name!r} has files in the format {min(formats)}, not Parquet; use fit(df)"
        )


def _check_ids(name: str, schema: Any, paths: Iterable[str]) -> None:
    """Raises ValueError if Spark would read null, because a file lacks a field ID."""
    defaults = dict(_find_defaults(schema.fields))
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="ringspark-footer") as pool:
        for path, ids in zip(paths, pool.map(_read_ids, paths), strict=True):
            if None in ids:
                raise ValueError(
                    f"Iceberg table {name!r} has the file {path!r} without field IDs; "
                    "rewrite the table's files, or use fit(df)"
                )
            if lacking := [field for field_id, field in defaults.items() if field_id not in ids]:
                raise ValueError(
                    f"column {lacking[0]!r} of Iceberg table {name!r} has a default value, because the file "
                    f"{path!r} lacks it; rewrite the table's files, or use fit(df)"
                )


def _find_defaults(fields: Iterable[Any], prefix: str = "") -> Iterator[tuple[int, str]]:
    """Yields the ID and the name of each field, at every depth, whose value files may lack."""
    for field in fields:
        if field.initial_default is not None:
            yield field.field_id, prefix + field.name
        kind = field.field_type
        parts = [getattr(kind, f"{part}_field", None) for part in ("element", "key", "value")]
        inside = kind.fields if kind.is_struct else filter(None, parts)
        yield from _find_defaults(inside, f"{prefix}{field.name}.")


def _read_ids(path: str) -> set[int | None]:
    """Returns the field IDs in a file, at every depth; None is among them if a field lacks one."""
    with storage.store_errors(path), storage.open_file(path) as source:
        waiting = [(field, True) for field in pq.read_schema(source)]
    found: set[int | None] = set()
    while waiting:
        field, needs_id = waiting.pop()
        field_id = (field.metadata or {}).get(b"PARQUET:field_id")
        if field_id is not None or needs_id:
            found.add(None if field_id is None else int(field_id))
        kind = field.type
        waiting += [(kind.field(index), pa.types.is_struct(kind)) for index in range(kind.num_fields)]
    return found


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


def _name(field: Any) -> str:
    return str(field.name)


def _name_by_id(field: Any) -> str:
    # Spark takes the type of a field from the wrong one if a file has another field of its name.
    return f"parquet field {field.field_id}"


def _spark_type(iceberg_type: Any, name: Callable[[Any], str]) -> Any:
    """Returns Spark's type as JSON, or None if Spark does not read it, or nothing in it, from Parquet.

    Types that Spark lacks become "binary", which few column types accept.
    """
    if iceberg_type.is_struct:
        fields = [
            {"name": name(field), "type": kind, "nullable": True, "metadata": {FIELD_ID: field.field_id}}
            for field in iceberg_type.fields
            if (kind := _spark_type(field.field_type, name)) is not None
        ]
        return {"type": "struct", "fields": fields} if fields else None
    text = str(iceberg_type)
    if text.startswith("list<"):
        element = _spark_type(iceberg_type.element_type, name)
        return element and {"type": "array", "elementType": element, "containsNull": True}
    if text.startswith("map<"):
        key, value = (_spark_type(each, name) for each in (iceberg_type.key_type, iceberg_type.value_type))
        found = {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": True}
        return found if key and value else None
    if text.startswith("decimal"):
        return text.replace(" ", "")
    return text if text in _SAME_TYPES else _OTHER_TYPES.get(text, "binary")
