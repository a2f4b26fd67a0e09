"""Writes what deltalake and pyiceberg cannot: deletion vectors, position deletes, a catalog's entries."""

import base64
import json
import os
import struct
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_B85 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"

# The bytes of a deletion vector that Spark wrote (kernel/tests/data/table-with-dv-small of delta-kernel-rs):
# rows 0 and 9.
OF_SPARK = bytes.fromhex("d1d33964 0100000000000000 00000000 3a300000 01000000 00000100 10000000 00000900")


def _z85(data: bytes) -> str:
    return base64.b85encode(data).decode().translate(str.maketrans(_B85, _Z85))


def encode_vector(rows: Sequence[int]) -> bytes:
    """Returns a deletion vector of fewer than 4,097 ascending row numbers per 65,536 rows."""
    containers: dict[int, list[int]] = {}
    for row in rows:
        containers.setdefault(row >> 16, []).append(row & 0xFFFF)
    head = struct.pack("<II", 12346, len(containers))
    keys = b"".join(struct.pack("<HH", key, len(low) - 1) for key, low in containers.items())
    offset, offsets, body = len(head) + len(keys) + 4 * len(containers), b"", b""
    for low in containers.values():
        offsets += struct.pack("<I", offset + len(body))
        body += struct.pack(f"<{len(low)}H", *low)
    return struct.pack("<iqI", 1681511377, 1, 0) + head + keys + offsets + body


def delete_delta_rows(root: Path, storage: str, deletes: dict[str, tuple[bytes, int]]) -> None:
    """Adds a version in which rows of files are deleted by vectors.

    `storage` is "i" (in the log), "u" (a file in the table's folder) or "p" (an absolute path). `deletes`
    holds the vector and its number of rows for each path in the log.
    """
    log = root / "_delta_log"
    last = max(int(path.stem) for path in log.glob("*.json"))
    lines = [
        json.loads(line) for path in sorted(log.glob("*.json")) for line in path.read_text().splitlines()
    ]
    features = ["deletionVectors"]
    for line in lines:
        if mode := line.get("metaData", {}).get("configuration", {}).get("delta.columnMapping.mode"):
            features += ["columnMapping"] if mode != "none" else []
    protocol: dict[str, Any] = {"minReaderVersion": 3, "minWriterVersion": 7}
    protocol |= dict.fromkeys(("readerFeatures", "writerFeatures"), features)
    added: list[Any] = [{"protocol": protocol}]
    for path, (vector, count) in deletes.items():
        (add,) = [line["add"] for line in lines if line.get("add", {}).get("path") == path]
        removed = {"path": path, "dataChange": True, "deletionTimestamp": 1}
        added += [
            {"remove": removed},
            {"add": add | {"deletionVector": _store(root, storage, vector) | {"cardinality": count}}},
        ]
    (log / f"{last + 1:020}.json").write_text("\n".join(map(json.dumps, added)))


def _store(root: Path, storage: str, vector: bytes) -> dict[str, Any]:
    if storage == "i":
        padded = vector + bytes(-len(vector) % 4)
        return {"storageType": "i", "pathOrInlineDv": _z85(padded), "sizeInBytes": len(vector)}
    name = uuid.uuid4()
    file = root / "ab" / f"deletion_vector_{name}.bin"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"\1" + struct.pack(">I", len(vector)) + vector + struct.pack(">I", zlib.crc32(vector)))
    path = f"ab{_z85(name.bytes)}" if storage == "u" else file.as_uri()
    return {"storageType": storage, "pathOrInlineDv": path, "offset": 1, "sizeInBytes": len(vector)}


def delete_iceberg_rows(table: Any, rows: dict[str, Sequence[int]], *, equality: bool = False) -> None:
    """Commits a snapshot with files of position deletes, or of equality deletes.

    `rows` holds the deleted row numbers for each data file. All files have the newest partition spec.
    """
    from pyiceberg.manifest import DataFile, DataFileContent, FileFormat, ManifestContent, ManifestWriterV2
    from pyiceberg.table.snapshots import Operation
    from pyiceberg.table.update.snapshot import _FastAppendFiles

    class DeleteWriter(ManifestWriterV2):
        def content(self) -> ManifestContent:
            return ManifestContent.DELETES

        @property
        def _meta(self) -> dict[str, str]:
            return {**super()._meta, "content": "deletes"}

    class Deletes(_FastAppendFiles):
        def new_manifest_writer(self, spec: Any) -> Any:
            output = self.new_manifest_output()
            return DeleteWriter(spec, self.schema(), output, self._snapshot_id, self._compression)

    def field(name: str, kind: Any, number: int) -> Any:
        return pa.field(name, kind, False, {"PARQUET:field_id": str(number)})

    schema = pa.schema([field("file_path", pa.string(), 2147483546), field("pos", pa.int64(), 2147483545)])
    nothing: dict[str, Any] = dict.fromkeys(("split_offsets", "sort_order_id", "key_metadata"))
    maps = ("column_sizes", "value_counts", "null_value_counts", "nan_value_counts")
    maps += ("lower_bounds", "upper_bounds")
    data = {task.file.file_path: task.file for task in table.scan().plan_files()}
    files = []
    for of, numbers in rows.items():
        uri = f"{table.location()}/data/deletes-{uuid.uuid4()}.parquet"
        path = uri.removeprefix("file://")
        pq.write_table(pa.Table.from_pylist([{"file_path": of, "pos": row} for row in numbers], schema), path)
        file = DataFile.from_args(
            content=DataFileContent.EQUALITY_DELETES if equality else DataFileContent.POSITION_DELETES,
            file_path=uri,
            file_format=FileFormat.PARQUET,
            partition=data[of].partition,
            record_count=len(numbers),
            file_size_in_bytes=os.path.getsize(path),
            equality_ids=[1] if equality else None,
            **nothing,
            **{name: {} for name in maps},
        )
        file.spec_id = data[of].spec_id
        files.append(file)
    with table.transaction() as transaction:
        producer = Deletes(operation=Operation.OVERWRITE, transaction=transaction, io=table.io)
        for file in files:
            producer.append_data_file(file)
        producer.commit()
    table.refresh()


def edit_metadata(table: Any, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the newest metadata file of an Iceberg table, as another writer would have written it."""
    path = Path(table.metadata_location.removeprefix("file://"))
    metadata = json.loads(path.read_text())
    change(metadata)
    path.write_text(json.dumps(metadata))


@contextmanager
def catalog_entry(
    spark: Any, name: str, provider: str, location: Path, properties: dict[str, str] | None = None
) -> Iterator[None]:
    """Context with an entry in Spark's catalog, as Spark makes it if it has the connector of `provider`."""
    uri = str(location).replace("%", "%25")
    spark.sql(f"CREATE TABLE {name} (id BIGINT) USING parquet LOCATION '{uri}'")
    for key, value in (properties or {}).items():
        spark.sql(f"ALTER TABLE {name} SET TBLPROPERTIES ('{key}' = '{value}')")
    state, jvm = spark._jsparkSession.sessionState(), spark._jvm
    table = state.catalog().getTableMetadata(state.sqlParser().parseTableIdentifier(name))
    names = [table.productElementName(index) for index in range(table.productArity())]
    values = spark.sparkContext._gateway.new_array(jvm.java.lang.Object, len(names))
    constructor = table.getClass().getConstructors()[0]
    for index, kind in enumerate(constructor.getParameterTypes()):
        value = table.productElement(index)
        if names[index] == "provider":
            value = jvm.scala.Some(provider)
        if kind.getName() == "long":  # py4j would pass an Integer
            jvm.java.lang.reflect.Array.set(values, index, jvm.java.lang.Long.valueOf(str(value)))
        else:
            values[index] = value
    state.catalog().externalCatalog().alterTable(constructor.newInstance(values))
    try:
        yield
    finally:
        # SQL asks for the connector.
        state.catalog().externalCatalog().dropTable("default", name, True, False)
