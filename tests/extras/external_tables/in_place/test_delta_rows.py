"""The rows of a listed Delta table are the rows that deltalake's own engine reads at this version."""

import json
import os
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lake_tables import OF_SPARK, catalog_entry, delete_delta_rows, encode_vector
from pyspark.sql.types import LongType, StructField, StructType
from spark_tables import time_zone

from ringspark.extras.external_tables.in_place.catalog import find_table
from ringspark.extras.external_tables.in_place.delta import list_delta
from ringspark.extras.external_tables.in_place.file_scan import FIELD_ID, find_scan
from ringspark.extras.external_tables.in_place.listing import Listing
from ringspark.extras.external_tables.in_place.table_frame import _BY_IDS, read_listing, reads_field_ids
from ringspark.pipelines import write_shards
from ringspark.pipelines.table_files import TableSource

deltalake = pytest.importorskip("deltalake")

pytestmark = pytest.mark.spark

# As the names of folders, these are escaped once or twice.
WORDS = ["a b", "100%", "x=y", "a/b", "%41", "Zürich", "c:d?*[]{}\\'\"", "+&#;,", "__", None]


def _write(root: Path, rows: int = 10, first: int = 0, **settings: Any) -> None:
    ids = list(range(first, first + rows))
    places = [{"x y": i, "z": -i} for i in ids]
    table = pa.table({"id": ids, "size": [[i / 7, 1.0] for i in ids], "place": places})
    deltalake.write_deltalake(str(root), table, mode="append", **settings)


def _log(root: Path, version: int) -> Path:
    return root / "_delta_log" / f"{version:020}.json"


def _paths(root: Path) -> list[str]:
    actions = pa.table(deltalake.DeltaTable(str(root)).get_add_actions(flatten=True))
    return sorted(actions.column("path").to_pylist())


def _read(spark: Any, root: Path, version: int | str | None = None) -> list[dict[str, Any]]:
    listing = list_delta(spark, str(root), version)
    with reads_field_ids(spark, listing):
        rows: list[dict[str, Any]] = read_listing(spark, listing).toArrow().to_pylist()
    return sorted(rows, key=repr)


def _scan(root: Path) -> list[dict[str, Any]]:
    return sorted(pa.table(deltalake.DeltaTable(str(root)).scan()).to_pylist(), key=repr)


@pytest.mark.parametrize("storage", ["i", "u", "p"])
@pytest.mark.slow
def test_deleted_rows_are_left_out(spark: Any, tmp_path: Path, storage: str) -> None:
    root = tmp_path / "a bü"
    _write(root)
    _write(root, rows=70_000, first=10)
    small, large = sorted(_paths(root), key=lambda path: (root / path).stat().st_size)
    gone = [0, 7, 65_535, 65_536, 69_999]
    delete_delta_rows(root, storage, {small: (OF_SPARK, 2), large: (encode_vector(gone), len(gone))})
    listing = list_delta(spark, str(root))
    assert {path: rows.tolist() for path, rows in listing.deleted.items()} == {small: [0, 9], large: gone}
    found = _read(spark, root)
    assert found == _scan(root)
    assert {row["id"] for row in found} == set(range(70_010)) - {0, 9} - {10 + row for row in gone}
    # The rows were there before.
    assert len(_read(spark, root, version=1)) == 70_010


@pytest.mark.parametrize("mode", ["name", "id"])
def test_columns_keep_their_values_under_new_names(spark: Any, tmp_path: Path, mode: str) -> None:
    _write(tmp_path, configuration={"delta.columnMapping.mode": mode}, partition_by=["id"])
    log = _log(tmp_path, 0)
    (metadata,) = [m for line in log.read_text().splitlines() if (m := json.loads(line).get("metaData"))]
    # ALTER TABLE RENAME COLUMN: two columns swap their names.
    text = metadata["schemaString"]
    for before, after in (("size", "?"), ("place", "size"), ("?", "place"), ("id", "day of"), ("x y", "X.y")):
        text = text.replace(f'"name":"{before}"', f'"name":"{after}"')
    renamed = {"metaData": metadata | {"schemaString": text, "partitionColumns": ["day of"]}}
    _log(tmp_path, 1).write_text(json.dumps(renamed))
    delete_delta_rows(tmp_path, "u", {_paths(tmp_path)[0]: (encode_vector([0]), 1)})
    found = _read(spark, tmp_path)
    assert found == _scan(tmp_path)
    assert len(found) == 9
    assert found[0].keys() == {"day of", "place", "size"}
    assert found[0]["size"].keys() == {"X.y", "z"}
    if mode == "id":
        # Only the ID says which column of a file this is.
        for path in tmp_path.rglob("*.parquet"):
            table = pq.read_table(path, partitioning=None)
            pq.write_table(table.rename_columns([f"old {n}" for n in range(table.num_columns)]), path)
        assert _read(spark, tmp_path) == found
    listing = list_delta(spark, str(tmp_path))
    with reads_field_ids(spark, listing):
        frame = read_listing(spark, listing).select("size")
        assert {row[0] for row in frame.selectExpr("size.z").collect()} == {row["size"]["z"] for row in found}
        scan = find_scan(frame, ["size"])
        assert scan.columns.keys() == {"size"}
        # The write compares each row of the files with Spark's.
        write_shards(frame, str(tmp_path / "shards"), references=scan.columns)


def test_partition_values_of_all_types_and_characters(spark: Any, tmp_path: Path) -> None:
    n = len(WORDS)
    times = [-1, 0, 1, 10**15 + 123_456, *range(2, n - 3), None]
    table = pa.table(
        {
            "id": range(n),
            "word": WORDS,
            "time": pa.array(times, pa.timestamp("us", "UTC")),
            "clock": pa.array(times, pa.timestamp("us")),
            "day": pa.array([*range(-2, n - 3), None], pa.date32()),
            "float": pa.array([0.1, -1e-30, 3e38, float("inf"), *range(n - 5), None], pa.float32()),
            "flag": [True, False] * (n // 2),
            "price": pa.array([*range(n - 1), None], pa.decimal128(9, 2)),
            "count": pa.array([-128, *range(n - 2), None], pa.int8()),
        }
    )
    names = table.column_names
    deltalake.write_deltalake(str(tmp_path), table, partition_by=names[1:])
    with time_zone(spark, "UTC"):
        assert _read(spark, tmp_path) == sorted(table.to_pylist(), key=repr)
        # Delta stores the empty text as null.
        empty = table.slice(0, 1).set_column(1, "word", pa.array([""]))
        deltalake.write_deltalake(str(tmp_path), empty, mode="overwrite", partition_by=names[1:])
        assert [row["word"] for row in _read(spark, tmp_path)] == [None]


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_times_of_partitions_are_those_of_spark(spark: Any, tmp_path: Path, has_checkpoint: bool) -> None:
    hour = 3_600_000_000
    times = pa.array([hour * number for number in range(4)], pa.timestamp("us", "UTC"))
    deltalake.write_deltalake(str(tmp_path), pa.table({"id": range(4), "time": times}), partition_by=["time"])
    log = _log(tmp_path, 0)
    text = log.read_text()
    texts = ["1970-01-01T00:00:00.000001Z", "1970-01-01 00:00:00", "1970-01-01 00:00:00+05:00", None]
    for number, value in enumerate(texts):
        text = text.replace(f'"time":"1970-01-01 0{number}:00:00.000000"', f'"time":{json.dumps(value)}')
    log.write_text(text)
    if has_checkpoint:
        deltalake.DeltaTable(str(tmp_path)).create_checkpoint()
        _log(tmp_path, 1).write_text('{"commitInfo":{}}')
        log.unlink()
    for name, local in (("Asia/Kolkata", -5.5), ("UTC", 0)):
        with time_zone(spark, name):
            frame = read_listing(spark, list_delta(spark, str(tmp_path)))
            found = sorted(map(tuple, frame.selectExpr("id", "unix_micros(time)").collect()))
            assert found == [(0, 1), (1, local * hour), (2, -5 * hour), (3, None)]


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_vectors_that_spark_ml_wrote_are_read(spark: Any, tmp_path: Path, has_checkpoint: bool) -> None:
    indices, numbers = pa.list_(pa.int32()), pa.list_(pa.float64())
    fields = [("type", pa.int8()), ("size", pa.int32()), ("indices", indices), ("values", numbers)]
    kind = pa.struct([pa.field(name, each) for name, each in fields])
    dense = [{"type": 1, "size": None, "indices": None, "values": [i / 3, 1.0]} for i in range(5)]
    sparse = [{"type": 0, "size": 2, "indices": [1], "values": [float(i)]} for i in range(5)]
    for version, vectors in enumerate((dense, sparse)):
        ids = range(5 * version, 5 * version + 5)
        table = pa.table({"id": ids, "vec": pa.array(vectors, kind), "other": pa.array(vectors, kind)})
        deltalake.write_deltalake(str(tmp_path), table, mode="append")
    delete_delta_rows(tmp_path, "u", {_paths(tmp_path)[0]: (encode_vector([0]), 1)})
    log = tmp_path / "_delta_log"

    def edit(action: dict[str, Any]) -> dict[str, Any]:
        """Returns what Spark writes for a renamed vector, and for a class that is not installed."""
        if protocol := action.get("protocol"):
            for side in ("readerFeatures", "writerFeatures"):
                protocol[side] = ["deletionVectors", "columnMapping"]
            protocol |= {"minReaderVersion": 3, "minWriterVersion": 7}
        if metadata := action.get("metaData"):
            schema = json.loads(metadata["schemaString"])
            for number, field in enumerate(schema["fields"]):
                field["metadata"] = {f"{mapping}.id": number, f"{mapping}.physicalName": field["name"]}
            names = "pyspark.ml.linalg.VectorUDT", "a.b.C"
            for field, name in zip(schema["fields"][1:], names, strict=True):
                field["type"] = {"type": "udt", "class": name, "pyClass": name, "sqlType": field["type"]}
            schema["fields"][1]["name"] = "features"
            metadata["schemaString"] = json.dumps(schema)
            metadata["configuration"] = {f"{mapping}.mode": "name", f"{mapping}.maxColumnId": "2"}
        return action

    mapping = "delta.columnMapping"
    if has_checkpoint:
        deltalake.DeltaTable(str(tmp_path)).create_checkpoint()
        _log(tmp_path, 3).write_text('{"commitInfo":{}}')
        for version in range(2):
            _log(tmp_path, version).unlink()
    for path in log.glob("*.json"):
        lines = [edit(json.loads(line)) for line in path.read_text().splitlines()]
        path.write_text("\n".join(map(json.dumps, lines)))
    for path in log.glob("*.parquet"):
        actions = pq.read_table(path)
        rows = [edit(row) for row in actions.to_pylist()]
        pq.write_table(pa.Table.from_pylist(rows, actions.schema), path)
    listing = list_delta(spark, str(tmp_path))
    assert listing.source.version == 2 + has_checkpoint
    types = {field.name: field.dataType.simpleString()[:6] for field in listing.schema}
    assert types == {"id": "bigint", "features": "vector", "other": "struct"}
    found = {row[0]: row[1].toArray().tolist() for row in read_listing(spark, listing).collect()}
    gone = {0, 5} - found.keys()
    assert len(gone) == 1
    expected = {i: [i / 3, 1.0] for i in range(5)} | {i + 5: [0.0, float(i)] for i in range(5)}
    assert found == {i: values for i, values in expected.items() if i not in gone}


def test_a_table_of_sparks_catalog_needs_no_connector(spark: Any, tmp_path: Path) -> None:
    with catalog_entry(spark, "of_delta", "delta", tmp_path / "a bü"):
        _write(tmp_path / "a bü")
        for name in ("of_delta", "Default.of_delta", "spark_catalog.default.`OF_delta`"):
            assert find_table(spark, name) == list_delta(spark, str(tmp_path / "a bü"))


def test_a_folder_is_not_taken_for_another_one(spark: Any, tmp_path: Path) -> None:
    _write(tmp_path / "a b", rows=3)
    (tmp_path / "a b").rename(tmp_path / "a%20b")
    _write(tmp_path / "a b", rows=6)
    # deltalake would read "a b" both times.
    for name, rows in (("a%20b", 3), ("a b", 6)):
        assert len(_read(spark, tmp_path / name)) == rows


def test_a_time_means_the_newest_version_at_that_time(spark: Any, tmp_path: Path) -> None:
    first = datetime(2026, 5, 1, 12, tzinfo=timezone.utc)
    # The last file is older than the file before it. Delta counts milliseconds, and file systems less.
    for version, hours in enumerate((0, 1, 3, 2)):
        _write(tmp_path, rows=1, first=version)
        moment = int((first + timedelta(hours=hours)).timestamp()) * 10**9 + 123_999_999
        os.utime(_log(tmp_path, version), ns=(moment, moment))
    with time_zone(spark, "Europe/Zurich"):
        for text, version in (
            ("2026-05-01 14:00:00.123", 0),
            ("2026-05-01T13:00:00.122Z", 0),
            ("2026-05-01T13:00:00.123Z", 1),
            ("2026-05-01 17:00:00.122", 1),
            ("2026-05-01 17:00:00.123", 2),
            ("2026-05-01 17:00:00.124", 3),
            ("2100-01-01", 3),
        ):
            assert list_delta(spark, str(tmp_path), text).source.version == version
        with pytest.raises(
            ValueError, match=r"no version as old as .*; its oldest is 0, of 2026-05-01 12:00"
        ):
            list_delta(spark, str(tmp_path), "2026-05-01 14:00:00.122")
        with pytest.raises(ValueError, match=r"a number or a time such as .*, got 'newest'"):
            list_delta(spark, str(tmp_path), "newest")


def test_a_time_in_a_commit_precedes_the_time_of_its_file(spark: Any, tmp_path: Path) -> None:
    for version in range(3):
        _write(tmp_path, rows=1, first=version)
        log = _log(tmp_path, version)
        first, *rest = log.read_text().splitlines()
        commit = json.loads(first)
        if version:  # the table got the feature in version 1
            commit["commitInfo"]["inCommitTimestamp"] = 1_800_000_000_000 + version
        log.write_text("\n".join([json.dumps(commit), *rest]))
        os.utime(log, (version, version))
    for text, version in (
        ("1970-01-01T00:00:09Z", 0),
        ("2027-01-15T08:00:00.001Z", 1),
        ("2027-01-15T08:00:00.002Z", 2),
    ):
        assert list_delta(spark, str(tmp_path), text).source.version == version


def test_what_is_not_read_exactly_is_refused(spark: Any, tmp_path: Path) -> None:
    root = tmp_path / "t"
    _write(root)
    delete_delta_rows(root, "u", {_paths(root)[0]: (OF_SPARK, 2)})
    log = _log(root, 1)
    text = log.read_text()
    log.write_text(text.replace('"deletionVectors"', '"deletionVectors", "rowsInAnotherPlace"'))
    with pytest.raises(ValueError, match="rowsInAnotherPlace"):
        list_delta(spark, str(root))
    log.write_text(text)
    (vector,) = root.glob("ab/*.bin")
    vector.write_bytes(vector.read_bytes()[:-4] + b"wrong")
    with pytest.raises(ValueError, match=r"deletion vectors of Delta table '.*' cannot be read .*REORG"):
        list_delta(spark, str(root))
    vector.unlink()
    with pytest.raises(ValueError, match=r"deletion vectors of Delta table '.*' cannot be read"):
        list_delta(spark, str(root))
    next(root.glob("*.parquet")).unlink()
    with pytest.raises(ValueError, match=r"lacks a file of its version 0 .* VACUUM"):
        list_delta(spark, str(root), 0)


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_the_last_of_two_readers_restores_the_setting(spark: Any, first_ends_first: bool) -> None:
    schema = StructType([StructField("id", LongType(), metadata={FIELD_ID: 1})])
    source = TableSource(uri="u", format="delta", version=1)
    listing = Listing(source=source, schema=schema, files=(), folder_columns={}, file_schema=schema)
    before = {name: spark.conf.get(name) for name in _BY_IDS}
    settings = set(spark.conf.getAll)
    readers = [ExitStack(), ExitStack()]
    for reader in readers:
        reader.enter_context(reads_field_ids(spark, listing))
    for reader in readers if first_ends_first else readers[::-1]:
        assert {name: spark.conf.get(name) for name in _BY_IDS} == _BY_IDS
        reader.close()
    assert {name: spark.conf.get(name) for name in _BY_IDS} == before
    assert set(spark.conf.getAll) - settings <= set(_BY_IDS)
