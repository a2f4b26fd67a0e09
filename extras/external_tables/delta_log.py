"""Reads from the log of a Delta table what the package `deltalake` does not: times, and types of Spark's own.

`deltalake` refuses a whole table if one column has a user-defined type, and takes each timestamp of a
partition as UTC. So it gets a copy of the log, in which such columns have other types. The schema in the copy
keeps the real types in the metadata of the columns.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ringspark.pipelines import storage

_LOG, _TYPE = "_delta_log", "ringspark.type"
_THREADS = 16
# Others would import a module that the log names.
_KNOWN_CLASSES = {f"pyspark.ml.linalg.{name}UDT" for name in ("Vector", "Matrix")}


def find_version(root: str, moment: datetime) -> int | None:
    """Returns the newest version at a moment, or None if the log has no commits.

    As in Delta, the time of a commit is in the commit, or is the time of its file. It is in milliseconds, and
    later than the time of the commit before. Raises ValueError if all versions are newer.
    """
    log = storage.join(root, _LOG)
    names = [name for name in storage.list_names(log) if re.fullmatch(r"\d{20}\.json", name)]
    if not names:
        return None
    paths = [storage.join(log, name) for name in names]
    time_of = _time_of_file if _time_in_commit(paths[-1]) is None else _time_of_commit
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="ringspark-log") as pool:
        times = list(pool.map(time_of, paths))
    start, found, last = datetime.fromtimestamp(0, timezone.utc), None, -1
    for name, time in zip(names, times, strict=True):
        last = max(time, last + 1)
        if start + timedelta(milliseconds=last) <= moment:
            found = int(name[:20])
    if found is None:
        raise ValueError(
            f"Delta table {root!r} has no version as old as {moment}; its oldest is {int(names[0][:20])}, of "
            f"{start + timedelta(milliseconds=times[0])}; pass a later time"
        )
    return found


def _time_of_file(path: str) -> int:
    if storage.is_local(path):
        return os.stat(path).st_mtime_ns // 1_000_000
    return int(1_000 * (storage.newest_change(path) or 0))


def _time_in_commit(path: str) -> int | None:
    first = json.loads(storage.read_bytes(path).partition(b"\n")[0])
    time: int | None = first.get("commitInfo", {}).get("inCommitTimestamp")
    return time


def _time_of_commit(path: str) -> int:
    return _time_in_commit(path) or _time_of_file(path)  # older than the table's feature


@contextmanager
def copy_log(root: str) -> Iterator[str]:
    """Context with the folder of a Delta table that has the log of `root`, with types that `deltalake` reads.

    The folder also has the deletion vectors of a local table.
    """
    with tempfile.TemporaryDirectory(prefix="ringspark-delta-") as folder:
        sizes: dict[str, int] = {}
        # Checkpoints name the sizes of their sidecars.
        for part in ("_sidecars", ""):
            source, target = storage.join(root, _LOG, part).rstrip("/"), os.path.join(folder, _LOG, part)
            os.makedirs(target, exist_ok=True)
            for name in storage.list_names(source):
                if name.endswith((".json", ".parquet")):
                    _copy_file(storage.join(source, name), os.path.join(target, name), sizes)
                    sizes[name] = os.path.getsize(os.path.join(target, name))
        for name in storage.list_names(root) if storage.is_local(root) else ():
            if name != _LOG and not name.endswith(".parquet"):
                os.symlink(storage.join(root, name), os.path.join(folder, name))
        yield folder


def _copy_file(source: str, target: str, sizes: dict[str, int]) -> None:
    data = storage.read_bytes(source)
    if source.endswith(".json"):
        lines = [_simplify(json.loads(line), sizes) for line in data.splitlines() if line.strip()]
        with open(target, "w") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        return
    columns = {}
    table = pq.read_table(pa.BufferReader(data))
    for name in table.column_names:
        values = table.column(name).combine_chunks()
        if name in ("metaData", "sidecar"):
            rows = [_simplify({name: row}, sizes)[name] for row in values.to_pylist()]
            values = pa.array(rows, values.type)
        elif name == "add":
            # The parsed values have the types of the schema.
            kept = [field for field in values.type if not field.name.endswith("_parsed")]
            fields = [field.with_nullable(True) for field in kept]
            parts = [pc.struct_field(values, field.name) for field in fields]
            values = pa.StructArray.from_arrays(parts, fields=fields, mask=values.is_null())
        columns[name] = values
    pq.write_table(pa.table(columns), target)


def _simplify(action: dict[str, Any], sizes: dict[str, int]) -> dict[str, Any]:
    if sidecar := action.get("sidecar"):
        sidecar["sizeInBytes"] = sizes.get(sidecar["path"], sidecar["sizeInBytes"])
    if metadata := action.get("metaData"):
        schema = json.loads(metadata["schemaString"])
        for field in schema["fields"]:
            is_time = field["type"] == "timestamp" and field["name"] in metadata["partitionColumns"]
            if is_time or '"type": "udt"' in json.dumps(field["type"]):
                field["metadata"] = {**field["metadata"], _TYPE: json.dumps(field["type"])}
                field["type"] = "string"
        metadata["schemaString"] = json.dumps(schema)
    return action


def restore_types(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of a copied log with the real types."""
    for field in schema["fields"]:
        if real := field["metadata"].pop(_TYPE, None):
            field["type"] = _replace_classes(json.loads(real))
    return schema


def _replace_classes(node: Any) -> Any:
    """Returns a part of a schema in which unknown classes have their SQL types."""
    if isinstance(node, list):
        return [_replace_classes(each) for each in node]
    if not isinstance(node, dict) or node.get("pyClass") in _KNOWN_CLASSES:
        return node
    if node.get("type") == "udt":
        return _replace_classes(node["sqlType"])
    return {key: _replace_classes(value) for key, value in node.items()}
