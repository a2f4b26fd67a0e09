"""The rows of a listed Delta table are the rows that deltalake's own engine reads at this version."""

from __future__ import annotations

import json
import os
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lake_tables import OF_SPARK, delete_delta_rows, encode_vector

from ringspark.pipelines.external.delta import list_delta
from ringspark.pipelines.external.table_frame import read_listing, reads_field_ids

deltalake = pytest.importorskip("deltalake")

pytestmark = pytest.mark.spark

# As the names of folders, these are escaped once or twice.
WORDS = ["a b", "100%", "x=y", "a/b", "%41", "Zürich", "c:d?*[]{}\\'\"", "+&#;,", "__", None]


def _write(root: Path, rows: int = 10, first: int = 0, **settings: Any) -> None:
    ids = list(range(first, first + rows))
    table = pa.table(
        {"id": ids, "size": [[i / 7, 1.0] for i in ids], "place": [{"x y": i, "z": -i} for i in ids]}
    )
    deltalake.write_deltalake(str(root), table, mode="append", **settings)


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
    log = tmp_path / "_delta_log" / f"{0:020}.json"
    (metadata,) = [m for line in log.read_text().splitlines() if (m := json.loads(line).get("metaData"))]
    # ALTER TABLE RENAME COLUMN: two columns swap their names.
    text = metadata["schemaString"]
    for before, after in (("size", "?"), ("place", "size"), ("?", "place"), ("id", "day of"), ("x y", "X.y")):
        text = text.replace(f'"name":"{before}"', f'"name":"{after}"')
    renamed = {"metaData": metadata | {"schemaString": text, "partitionColumns": ["day of"]}}
    log.with_name(f"{1:020}.json").write_text(json.dumps(renamed))
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
    zone = spark.conf.get("spark.sql.session.timeZone")
    names = table.column_names
    deltalake.write_deltalake(str(tmp_path), table, partition_by=names[1:])
    try:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
        assert _read(spark, tmp_path) == sorted(table.to_pylist(), key=repr)
        # Delta stores the empty text as null.
        empty = table.slice(0, 1).set_column(1, "word", pa.array([""]))
        deltalake.write_deltalake(str(tmp_path), empty, mode="overwrite", partition_by=names[1:])
        assert [row["word"] for row in _read(spark, tmp_path)] == [None]
        # deltalake reads these timestamps as UTC, and Spark in the time zone of the session.
        spark.conf.set("spark.sql.session.timeZone", "America/New_York")
        listing = list_delta(spark, str(tmp_path))
        assert read_listing(spark, listing).select("id", "clock").count() == 1
        with pytest.raises(Exception, match=r"by the timestamp 'time', .* America/New_York; set spark.sql"):
            read_listing(spark, listing).select("time").collect()
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)


def test_a_time_means_the_newest_version_at_that_time(spark: Any, tmp_path: Path) -> None:
    zone = spark.conf.get("spark.sql.session.timeZone")
    first = datetime(2026, 5, 1, 12, tzinfo=timezone.utc)
    for version in range(3):
        _write(tmp_path, rows=1, first=version)
        moment = (first + timedelta(hours=version)).timestamp()
        os.utime(tmp_path / "_delta_log" / f"{version:020}.json", (moment, moment))
    try:
        spark.conf.set("spark.sql.session.timeZone", "Europe/Zurich")
        for text, version in (
            ("2026-05-01 14:00:00", 0),
            ("2026-05-01T14:59:59.999Z", 2),
            ("2026-05-01 15:00", 1),
            ("2100-01-01", 2),
        ):
            assert list_delta(spark, str(tmp_path), text).source.version == version
        with pytest.raises(
            ValueError, match=r"no version as old as .*; its oldest is 0, of 2026-05-01 12:00"
        ):
            list_delta(spark, str(tmp_path), "2026-05-01 13:59:59")
        with pytest.raises(ValueError, match=r"a number or a time such as .*, got 'newest'"):
            list_delta(spark, str(tmp_path), "newest")
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)


def test_what_is_not_read_exactly_is_refused(spark: Any, tmp_path: Path) -> None:
    root = tmp_path / "t"
    _write(root)
    delete_delta_rows(root, "u", {_paths(root)[0]: (OF_SPARK, 2)})
    log = root / "_delta_log" / f"{1:020}.json"
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
