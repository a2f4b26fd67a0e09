"""Values of pandas are read without Spark; test_kinds.py compares every column type with Spark."""

import datetime
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyspark.sql import functions as F
from spark_tables import time_zone

from ringspark.pipelines import Array, Kind, Padded, Scalar, Vocabulary
from ringspark.pipelines.local_rows import LocalInput, read_column


def read(kind: Kind | None, values: list[Any], **options: Any) -> Any:
    return read_column(LocalInput(name="x", kind=kind, **options), pd.Series(values, dtype=object))


@pytest.mark.spark
def test_times_without_an_offset_mean_what_they_mean_in_spark(spark: Any) -> None:
    # In Berlin, the first time is skipped, the second comes twice, and others are far away.
    texts = ["2024-03-31 02:30:00", "2024-10-27 02:30:00", "1850-01-01 00:00:00", "2500-06-01 12:00:00.25"]
    with time_zone(spark, "Europe/Berlin"):
        frame = spark.createDataFrame([(text,) for text in texts], "x string")
        wanted = [row[0] for row in frame.select(F.unix_micros(F.to_timestamp("x"))).collect()]
    found = read(Scalar("int64"), texts, source="timestamp", zone="Europe/Berlin")
    assert found.arrays[""].tolist() == wanted
    days = [datetime.date(1970, 1, 3), "1969-12-31", np.datetime64("1970-01-01T23:00")]
    assert read(Scalar("int32"), days, source="date").arrays[""].tolist() == [2, -1, 0]


def test_missing_values_are_zeros_with_a_mask_if_the_training_had_some() -> None:
    found = read(Array("int32", (2,)), [[1, None], None, [3, 4]], fills_nulls=True)
    assert found.arrays[""].tolist() == [[1, 0], [0, 0], [3, 4]]
    assert (found.masked.tolist(), found.problems) == ([True, True, False], {})
    assert list(read(Scalar("float64"), [1.0, None, float("nan")]).problems) == [1, 2]
    words = read(Vocabulary(words=("a",)), ["a", None, "b"], fills_nulls=True)
    assert (words.arrays[""].tolist(), words.masked.tolist()) == ([0, 1, 1], [False, True, False])


@pytest.mark.parametrize(
    ("kind", "values", "told"),
    [
        (Scalar("int64"), [2.0, 1.5], "column 'x' held int64 .*Float value 1.5"),
        (Scalar("int64"), [float("inf")], "int64 .*Float value inf"),
        (Array("int32", (2,)), [[2.0, 1.5]], "int64 .*Float value 1.5"),
        (Padded("int8", 2), [[300, 1]], "int8 .* 300"),
        (Scalar("bool"), [0.5], "bool .* neither 0 nor 1"),
        (Scalar("int64"), ["7"], "holds '7', which is not a number"),
        (Array("float32", (2,)), [[1.0]], r"shape \(1,\), but the model was trained on shape \(2,\)"),
        (Array("float32", (2, 2)), [[[1], [1, 2]]], r"shape \(2, 1\), but .* \(2, 2\)"),
        (Padded("int8", 2), [[1, 2, 3]], "3 elements, .* at most 2"),
        (Vocabulary(words=("a",)), [5], "holds 5, .* trained on strings"),
        (None, [{"a": 1}], "holds {'a': 1}, which is not a number"),
    ],
)
def test_values_of_another_type_are_refused(kind: Kind | None, values: list[Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        read(kind, values)
