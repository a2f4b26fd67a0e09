"""Which DataFrames `fix_rows` copies."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from changing_frames import random_function

from ringspark.pipelines.fixed_rows import fix_rows

pytestmark = pytest.mark.spark

SAME: dict[str, Callable[[Any, Any], Any]] = {
    "pandas": lambda spark, _: spark.createDataFrame(pd.DataFrame({"id": range(9)})),
    "a range": lambda spark, _: spark.range(9),
    "files": lambda _, files: files.where("id > 3").selectExpr("id", "sqrt(id) AS x"),
    "cached files": lambda _, files: files.cache(),
    "a broadcast join": lambda spark, files: files.join(spark.range(3).hint("broadcast"), "id"),
    "union and coalesce": lambda _, files: files.union(files).coalesce(1),
}
OTHER: dict[str, Callable[[Any, Any], Any]] = {
    "an aggregate": lambda _, files: files.groupBy("id").sum("id"),
    "a limit": lambda _, files: files.limit(3),
    "a sample": lambda _, files: files.sample(0.5),
    "a random number": lambda _, files: files.selectExpr("id", "rand() AS x"),
    "the clock": lambda _, files: files.selectExpr("id", "now() AS x"),
    # Spark takes the names of special dates in any case.
    "a special date": lambda _, files: files.selectExpr("id", "CAST('Today' AS date) AS x"),
    "a Python function": lambda spark, _: random_function(spark),
    "a cached Python function": lambda spark, _: random_function(spark).cache(),
    "a broken line": lambda spark, files: _csv(spark, files),
    "a text that looks like a title": lambda _, files: files.selectExpr(
        "id", "'a\n== Physical Plan ==\nb' AS x", "rand() AS y"
    ),
    "a repartition": lambda _, files: files.repartition(3),
}


def _csv(spark: Any, files: Any) -> Any:
    folder = files.inputFiles()[0].rpartition("/")[0] + "-csv"
    files.selectExpr("id", "if(id % 2 = 0, 'bad', string(id)) AS x").write.csv(folder)
    return spark.read.schema("id int, x int").option("mode", "DROPMALFORMED").csv(folder)


@pytest.fixture
def files(spark: Any, tmp_path: Path) -> Iterator[Any]:
    spark.range(9).write.parquet(str(tmp_path / "files"))
    yield spark.read.parquet(str(tmp_path / "files"))
    spark.catalog.clearCache()  # other tests have the same plans


@pytest.mark.parametrize("kind", SAME)
def test_rows_that_are_always_the_same_are_not_copied(spark: Any, files: Any, kind: str) -> None:
    frame = SAME[kind](spark, files)
    assert fix_rows(frame) is frame


def test_what_the_user_has_cached_stays_cached_and_is_copied(spark: Any, files: Any) -> None:
    same, other = files.selectExpr("id * 2 AS id").cache(), random_function(spark).cache()
    rows = other.collect()
    assert fix_rows(same) is same
    assert fix_rows(other).collect() == rows == other.collect()
    assert same.storageLevel.useMemory
    assert other.storageLevel.useMemory


@pytest.mark.parametrize("kind", OTHER)
def test_rows_that_may_change_are_copied(spark: Any, files: Any, kind: str) -> None:
    frame = OTHER[kind](spark, files)
    fixed = fix_rows(frame)
    assert fixed is not frame
    assert sorted(map(str, fixed.collect())) == sorted(map(str, fixed.collect()))
    assert fixed.schema == frame.schema
