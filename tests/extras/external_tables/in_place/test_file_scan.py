"""Columns of any name are found in the Parquet files below a DataFrame."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F

from ringspark.extras.external_tables.in_place.file_scan import find_scan
from ringspark.pipelines.columns import quote

pytestmark = pytest.mark.spark

NAMES = ["a:b", "c,d", "e>f", "g<h", "i.j", "k l", "m`n", "o#p", "price (EUR)", "q[0]", "t=u", "x AS y"]
NAMES += ["'z'", '"q"', "cast(a as int)", "id#5", "st:struct<p:int>"]


def test_names_may_hold_the_marks_of_a_plan(spark: Any, tmp_path: Path) -> None:
    made = [f"id AS {quote(name)}" for name in NAMES]
    # A field of a struct has the name of a partition column, whose values are in no file.
    nested = "named_struct('a:b>', id, 'p', id) AS st"
    rows = spark.range(0, 9, 1, 1).selectExpr(*made, nested, "id % 3 AS p")
    rows.write.partitionBy("p").parquet(str(tmp_path / "rows"))
    frame = spark.read.parquet(str(tmp_path / "rows"))
    found = find_scan(frame, frame.columns).columns
    assert {name: column.name for name, column in found.items()} == {name: name for name in [*NAMES, "st"]}
    renamed = frame.select(F.col("`a:b`").alias("c>d"), (F.col("`c,d`") + 1).alias("e"), F.col("`e>f`"))
    found = find_scan(renamed, renamed.columns).columns
    assert {name: column.name for name, column in found.items()} == {"c>d": "a:b", "e>f": "e>f"}
