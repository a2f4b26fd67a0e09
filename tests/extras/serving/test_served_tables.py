"""A served table computes the numbers of Spark: texts of numbers and times, huge ids, far dates, offsets."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyspark.sql import functions as F
from spark_tables import time_zone

from ringspark.estimators import TorchClassifier
from ringspark.estimators.prepared_fit import TABLE_COLUMN, prepare_fit
from ringspark.pipelines import open_reader, write_shards
from ringspark.pipelines.kinds.table_row import time_of
from ringspark.pipelines.kinds.table_values import time_of_text
from ringspark.pipelines.kinds.values import microseconds
from ringspark.pipelines.local_rows import LocalInput, read_column

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.mark.parametrize("zone", ["GMT+08:00", pytest.param("PST", marks=pytest.mark.slow)])
def test_odd_columns_are_served_as_spark_reads_them(spark: Any, tmp_path: Any, zone: str) -> None:
    with time_zone(spark, zone):
        rows = spark.range(0, 300, 1, 1).selectExpr(
            "id + (1L << 60) AS big", "string(id / 7) AS text", "array(id, 2L * id) AS v",
            "string(date_add(DATE'2020-01-01', int(id))) AS day", "id % 2 AS label",
            "if(id = 9, TIMESTAMP'9999-12-31 01:00:00', timestamp_seconds(id * 40000)) AS t",
            "if(id = 7, 'NA', string(id + (1L << 60))) AS huge", "array(id + (1L << 60)) AS ids",
            "CAST(id + (1L << 60) AS DECIMAL(38, 2)) + 0.25 AS exact",
            "if(id = 5, 'NA', date_format(date_add(DATE'2020-01-01', int(id)), 'dd/MM/yyyy')) AS spoken",
        )  # fmt: skip
        prepared = prepare_fit(TorchClassifier(labelCol="label"), rows)
        stored = prepared.dataset.select("big", TABLE_COLUMN)
        kinds = {TABLE_COLUMN: prepared.plan.kind}
        manifest = write_shards(stored, str(tmp_path / "s"), columns=kinds, num_files=1)
        (batch,) = open_reader(manifest, engine="arrow", shuffle=False, batch_size=300).batches(0)
        collected = rows.withColumn("t", F.col("t").cast("string")).collect()
    names = ["big", "text", "v", "day", "t", "huge", "ids", "exact", "spoken"]
    columns = {name: pd.Series([row[name] for row in collected]) for name in names}
    found = read_column(LocalInput(name=TABLE_COLUMN, kind=prepared.plan.kind), columns).arrays
    assert prepared.plan.kind.sources == names
    assert np.array_equal(found[".numbers"], batch[f"{TABLE_COLUMN}.numbers"], equal_nan=True)
    assert np.array_equal(found[".ids"], batch[f"{TABLE_COLUMN}.ids"])


TIMES = [
    *("2020-01-05", "2020-1-5", " 2020-01 ", "2020", "12:30", "12:30:15", "2020-01-05 7", "2020-01-05 7:5"),
    *("2020-01-05T07:05:03.123456789", "2020-01-05 07:05:03.5Z", "2020-01-05 07:05:03 +02:00", "1/2/20"),
    *("2020-01-05 07:05:03+0200", "2020-01-05 07:05:03 UTC", "2020-01-05 07:05:03GMT+2", "2020-02-30"),
    *("12/31/2020", "31/12/2020 11:30", "31.12.2020", "2020/12/31", "2020.12.31 11:30", "4-5-2020"),
    *("20200105", "2020-01-05 24:00", "2020-01-05 11:30 PM", "Jan 5 2020", "2020-01-05T", "0001-01-01"),
]


@pytest.mark.parametrize("day_first", [False, True])
def test_a_text_is_served_as_the_time_that_spark_reads(spark: Any, day_first: bool) -> None:
    zone = spark.conf.get("spark.sql.session.timeZone")
    frame = spark.createDataFrame([(text,) for text in TIMES], "text string")
    micros = F.unix_micros(time_of(F.col("text"), zone, day_first))
    for text, expected in frame.select("text", micros).collect():
        found = time_of_text(text, day_first)
        assert (None if found is None else int(microseconds([found], zone)[0][0])) == expected, text
