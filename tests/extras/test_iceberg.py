"""Tables of catalogs: a listed Iceberg table has the rows of pyiceberg's own scan, and a fit uses them."""

from collections.abc import Iterator
from datetime import datetime, time, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lake_tables import catalog_entry, delete_iceberg_rows, edit_metadata
from parity import assert_equal_weights

from ringspark.estimators import TorchRegressor
from ringspark.extras.external_tables.in_place.catalog import find_table
from ringspark.extras.external_tables.in_place.file_scan import find_scan
from ringspark.extras.external_tables.in_place.table_frame import read_listing, reads_field_ids
from ringspark.models import ModelSpec
from ringspark.pipelines import open_reader, write_shards

pytest.importorskip("pyiceberg")

pytestmark = pytest.mark.spark

NAME = "lake.db.sales"


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from pyiceberg.catalog import load_catalog

    warehouse = tmp_path / "ware house"
    warehouse.mkdir()
    # pyiceberg reads its configuration once, when it is imported.
    monkeypatch.setattr(
        "pyiceberg.catalog._ENV_CONFIG.config",
        {"catalog": {"lake": {"uri": f"sqlite:///{tmp_path}/c.db", "warehouse": f"file://{warehouse}"}}},
    )
    found = load_catalog("lake")
    found.create_namespace("db")
    yield found
    found.close()


def _rows(first: int, rows: int, *, is_old: bool = True) -> Any:
    """Returns rows before or after renamed, widened and added columns."""
    ids = range(first, first + rows)
    size, city, narrow = ("size", "y", pa.int32()) if is_old else ("extent", "city", pa.int64())
    columns = {
        "id": pa.array(ids, pa.int64()),
        size: [[i / 7, 1.0] for i in ids],
        "place": [{"x": i, city: f"c{i % 3}"} for i in ids],
        "day": pa.array(ids, pa.int32()).cast(pa.date32()),
        "time": pa.array(ids, pa.timestamp("us", "UTC")),
        "clock": pa.array(ids, pa.timestamp("us")),
        "price": pa.array(ids, pa.decimal128(15, 2)),
        "narrow": pa.array([i // 40 for i in ids], narrow),
    }
    return pa.table(columns if is_old else columns | {"size": [0.5] * rows})


def _sales(catalog: Any, rows: int) -> Any:
    table = catalog.create_table("db.sales", _rows(0, 1).schema)
    if rows:
        table.append(_rows(0, rows))
    return table


def _rename(table: Any, name: str, renamed: str) -> None:
    with table.update_schema() as update:
        update.rename_column(name, renamed)


def _read(spark: Any, version: int | str | None = None) -> list[Any]:
    listing = find_table(spark, NAME, version)
    with reads_field_ids(spark, listing):
        return sorted(read_listing(spark, listing).toArrow().to_pylist(), key=repr)


def _scan(table: Any, **settings: Any) -> list[Any]:
    return sorted(table.scan(**settings).to_arrow().to_pylist(), key=repr)


def _linear(folder: Path, **params: Any) -> TorchRegressor:
    network = ModelSpec("linear", {"in_features": 2, "out_features": 1})
    settings = {"labelCol": "id", "epochs": 2, "batchSize": 24, "learningRate": 1e-4}
    settings |= {"storageUri": str(folder), "showProgress": False}
    return TorchRegressor(model=network, featuresCol="extent", **settings | params)


@pytest.mark.slow
def test_rows_and_weights_are_those_of_the_snapshot(spark: Any, catalog: Any, tmp_path: Path) -> None:
    from pyiceberg.transforms import IdentityTransform
    from pyiceberg.types import DoubleType, LongType

    # A table with renamed, widened and added columns, and with partitions.
    table = _sales(catalog, 60)
    _rename(table, "size", "extent")
    _rename(table, "place.y", "city")
    with table.update_schema() as update:
        update.update_column("narrow", LongType())
        update.add_column("size", DoubleType())
    with table.update_spec() as spec:
        spec.add_field("narrow", IdentityTransform())
    first = table.current_snapshot().snapshot_id
    table.append(_rows(60, 100, is_old=False))
    files = [task.file.file_path for task in table.scan().plan_files() if task.file.spec_id]
    assert len(files) == 3  # one per partition
    delete_iceberg_rows(table, {files[0]: [0, 1], files[-1]: [2]})
    delete_iceberg_rows(table, {files[-1]: [0, 2]})
    listing = find_table(spark, NAME)
    assert sorted(map(len, listing.deleted.values())) == [2, 2]
    found = _read(spark)
    assert len(found) == 156
    assert found == _scan(table)
    # A snapshot has the names of its time.
    assert _read(spark, first) == _scan(table, snapshot_id=first)
    assert "place" in _read(spark, first)[0]

    torch.manual_seed(0)
    run = {"runUri": str(tmp_path / "run"), "storageUri": None}
    with reads_field_ids(spark, listing):
        frame = read_listing(spark, listing).select("id", "extent")
        shards = write_shards(frame, str(tmp_path / "shards")).uri
    copied = _linear(tmp_path / "runs").fitOnShards(shards)
    in_place = _linear(tmp_path, **run).fitOnTable(NAME)
    assert list(in_place.summary.history.rows) == [156, 156]
    assert_equal_weights(in_place, copied)
    assert spark.conf.get("spark.sql.parquet.fieldId.read.enabled") == "false"

    # The run resumes with its own snapshot.
    table.append(_rows(160, 5, is_old=False))
    assert_equal_weights(_linear(tmp_path, **run, resume=True).fitOnTable(NAME), in_place)
    with pytest.raises(ValueError, match=rf"version {listing.source.version} -> .* version {first}"):
        _linear(tmp_path, **run, resume=True).fitOnTable(NAME, first)
    # Spark reads null for an added column in older files, and a fit refuses nulls.
    with pytest.raises(ValueError, match="'size' has nulls in 60 of 161 rows"):
        _linear(tmp_path / "runs", labelCol="size").fitOnTable(NAME)


def test_fields_of_structs_are_found_by_their_ids(spark: Any, catalog: Any, tmp_path: Path) -> None:
    old = [{"u": i, "in": {"v": -i}} for i in range(2)]
    new = [{"in": i, "v": {"u": -i}} for i in range(2, 4)]
    before, after = pa.table({"id": [0, 1], "st": old}), pa.table({"id": [2, 3], "st": new})
    table = catalog.create_table("db.sales", before.schema)
    table.append(before)
    for name, renamed in (("st.u", "w"), ("st.in.v", "u"), ("st.in", "v"), ("st.w", "in")):
        _rename(table, name, renamed)
    table.append(after)
    assert _read(spark) == _scan(table)
    listing = find_table(spark, NAME)
    with reads_field_ids(spark, listing):
        frame = read_listing(spark, listing)
        # Spark reads single fields of a struct without the others.
        found = frame.selectExpr("id", "st.in", "st.v.u").collect()
        assert sorted(map(tuple, found)) == [(i, i, -i) for i in range(4)]
        scan = find_scan(frame, ["id", "st"])
        assert scan.columns.keys() == {"id", "st"}
        # The write compares each row of the files with Spark's.
        shards = write_shards(frame, str(tmp_path / "shards"), references=scan.columns)
    (batch,) = open_reader(shards, batch_size=4).batches(1)
    assert sorted(batch["st"].tolist()) == [[i, -i] for i in range(4)]


def test_an_explicit_version_has_the_names_of_its_snapshot(spark: Any, catalog: Any, tmp_path: Path) -> None:
    table = _sales(catalog, 60)
    snapshot = table.current_snapshot()
    _rename(table, "size", "extent")
    assert _read(spark)[0].keys() >= {"extent"}
    moment = datetime.fromtimestamp(snapshot.timestamp_ms / 1000, timezone.utc)
    for version in (snapshot.snapshot_id, moment.isoformat(timespec="milliseconds")):
        assert _read(spark, version)[0].keys() >= {"size"}
    # A run without a version begins with the names of this moment, and keeps them.
    run = {"runUri": str(tmp_path / "run"), "storageUri": None, "epochs": 1}
    first = _linear(tmp_path, **run).fitOnTable(NAME)
    _rename(table, "extent", "area")
    assert_equal_weights(_linear(tmp_path, **run, resume=True).fitOnTable(NAME), first)


def test_default_values_are_refused_if_a_file_lacks_them(spark: Any, catalog: Any) -> None:
    table = _sales(catalog, 9)

    def add_defaults(metadata: dict[str, Any]) -> None:
        metadata["format-version"] = 3
        metadata["next-row-id"] = 0
        for field in metadata["schemas"][-1]["fields"]:
            if field["name"] == "id":
                field |= {"initial-default": 5, "write-default": 5}

    edit_metadata(table, add_defaults)
    assert len(_read(spark)) == 9  # each file holds the column

    def add_fields(metadata: dict[str, Any]) -> None:
        added = {"id": 99, "name": "z", "required": False, "type": "int", "initial-default": 5}
        for field in metadata["schemas"][-1]["fields"]:
            if field["name"] == "place":
                field["type"]["fields"].append(added)

    edit_metadata(table, add_fields)
    with pytest.raises(ValueError, match=r"'place.z' of .* has a default value, .* '.*parquet' lacks it"):
        find_table(spark, NAME)


def test_types_that_spark_does_not_read_are_left_out(spark: Any, catalog: Any, caplog: Any) -> None:
    noon = pa.array([time(12)], pa.time64("us"))
    place = pa.StructArray.from_arrays([noon, pa.array([1])], names=["at", "x"])
    times = pa.ListArray.from_arrays([0, 1], noon)
    rows = pa.table({"id": [7], "noon": noon, "place": place, "times": times})
    catalog.create_table("db.sales", rows.schema).append(rows)
    assert _read(spark) == [{"id": 7, "place": {"x": 1}}]
    message = "Spark does not read the types of ['noon', 'times'] in Iceberg table 'lake.db.sales'"
    assert message in caplog.text


def test_what_pyiceberg_cannot_parse_is_refused_in_one_sentence(spark: Any, catalog: Any) -> None:
    added = {"id": 99, "name": "v", "required": False, "type": "variant"}
    edit_metadata(_sales(catalog, 9), lambda metadata: metadata["schemas"][-1]["fields"].append(added))
    with pytest.raises(ValueError, match=r"'lake.db.sales' .* 'variant'.* use fit\(df\)") as caught:
        find_table(spark, NAME)
    assert type(caught.value) is ValueError
    assert "\n" not in str(caught.value)


def test_an_iceberg_entry_of_sparks_catalog_names_its_metadata(spark: Any, catalog: Any) -> None:
    table = _sales(catalog, 9)
    folder, properties = Path(table.location()), {"metadata_location": table.metadata_location}
    with catalog_entry(spark, "of_spark", "iceberg", folder, properties):
        assert find_table(spark, "default.of_spark") == find_table(spark, NAME)
    with catalog_entry(spark, "of_hive", "json", folder, properties):
        assert find_table(spark, "of_hive") == find_table(spark, NAME)
    with (
        catalog_entry(spark, "of_none", "ICEBERG", folder),
        pytest.raises(ValueError, match=r"'of_none' is an Iceberg table, and pyiceberg finds no"),
    ):
        find_table(spark, "of_none")


def test_what_is_not_in_the_files_is_refused(spark: Any, catalog: Any, tmp_path: Path) -> None:
    def refuses(sentence: str, name: str = NAME, version: int | str | None = None) -> None:
        with pytest.raises(ValueError, match=sentence):
            find_table(spark, name, version)

    refuses("no table 'lake.db.sales', and pyiceberg finds no Iceberg table .*PYICEBERG_CATALOG__LAKE__URI")
    refuses("no table 'lak.db.sales', and pyiceberg .* catalog 'lak'", "lak.db.sales")
    refuses("no table 'sales', and pyiceberg", "sales")
    refuses("needs a name such as 'catalog.schema.table', got ''", "")
    table = _sales(catalog, 0)
    refuses("has no rows yet")
    table.append(_rows(0, 9))
    refuses(r"has no snapshot 7; its newest ones are \[\d+\]", version=7)
    refuses("has no snapshot '2020-01-01'", version="2020-01-01")
    assert find_table(spark, NAME, "2100-01-01") == find_table(spark, NAME)
    (file,) = [task.file.file_path for task in table.scan().plan_files()]
    path = Path(file.removeprefix("file://"))
    bare = {name: pq.read_table(path)[name].to_pylist() for name in ("id", "day")}  # no field IDs
    pq.write_table(pa.table(bare), path.with_name("other.parquet"))
    table.add_files([file.replace(path.name, "other.parquet")])
    refuses("has the file .*other.parquet' without field IDs")
    edit_metadata(table, lambda metadata: metadata["properties"].clear())
    refuses("has the file .*other.parquet' without field IDs")
    table.overwrite(_rows(0, 9))
    (file,) = [task.file.file_path for task in table.scan().plan_files()]
    delete_iceberg_rows(table, {file: [1]}, equality=True)
    refuses("has equality deletes, .* rewrite its files")


def test_tables_of_sparks_catalog_are_found_by_name(spark: Any, tmp_path: Path) -> None:
    spark.range(96).selectExpr("id", "array(id / 96, 1D) as extent").createOrReplaceTempView("some_rows")
    spark.sql(f"CREATE TABLE of_ids USING parquet LOCATION '{tmp_path}/t' AS SELECT * FROM `some_rows`")
    spark.sql(f"CREATE TABLE in_json USING json LOCATION '{tmp_path}/j' AS SELECT * FROM `some_rows`")
    spark.sql("CREATE VIEW seen AS SELECT * FROM of_ids")
    try:
        model = _linear(tmp_path).fitOnTable("spark_catalog.default.`of_ids`")
        assert list(model.summary.history.rows) == [96, 96]
        for name, version, sentence in (
            ("of_ids", 3, "has Parquet files, which have no versions; leave out version=3"),
            ("in_json", None, "has the format 'json', and only Parquet, Delta and Iceberg tables"),
            ("seen", None, r"'seen' is a view, .* use fit\(spark.table\('seen'\)\)"),
            ("some_rows", None, "'some_rows' is a view"),
        ):
            with pytest.raises(ValueError, match=sentence):
                find_table(spark, name, version)
    finally:
        spark.sql("DROP VIEW seen")
        spark.sql("DROP TABLE of_ids")
        spark.sql("DROP TABLE in_json")
        spark.catalog.dropTempView("some_rows")
