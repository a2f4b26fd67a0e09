"""A served table computes the numbers of Spark: texts of numbers and times, huge ids, far dates, offsets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from ringspark.estimators import TorchClassifier
from ringspark.estimators.table_fit import TABLE_COLUMN, prepare_fit
from ringspark.extras.serving.plain.table import read_table
from ringspark.pipelines import open_reader, write_shards

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.mark.parametrize("zone", ["GMT+08:00", "PST"])
def test_odd_columns_are_served_as_spark_reads_them(spark: Any, tmp_path: Any, zone: str) -> None:
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        rows = spark.range(0, 300, 1, 1).selectExpr(
            "id + (1L << 60) AS big", "string(id / 7) AS text", "array(id, 2L * id) AS v",
            "string(date_add(DATE'2020-01-01', int(id))) AS day", "id % 2 AS label",
            "if(id = 9, TIMESTAMP'9999-12-31 01:00:00', timestamp_seconds(id * 40000)) AS t",
        )  # fmt: skip
        prepared = prepare_fit(TorchClassifier(labelCol="label"), rows)
        assert prepared.plan is not None
        table = prepared.dataset.select("big", TABLE_COLUMN)
        kinds = {TABLE_COLUMN: prepared.plan.kind}
        manifest = write_shards(table, str(tmp_path / "s"), columns=kinds, num_files=1)
        (batch,) = open_reader(manifest, engine="arrow", shuffle=False, batch_size=300).batches(0)
        collected = rows.selectExpr("big", "text", "v", "day", "string(t) AS t").collect()
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
    columns = {name: pd.Series([row[name] for row in collected]) for name in ("big", "text", "v", "day", "t")}
    found = read_table(columns, prepared.plan.kind.to_json()).arrays
    assert prepared.plan.kind.sources == ["big", "text", "v", "day", "t"]
    assert np.allclose(found[".numbers"], batch[f"{TABLE_COLUMN}.numbers"], atol=1e-5, equal_nan=True)
    assert np.array_equal(found[".ids"], batch[f"{TABLE_COLUMN}.ids"])
