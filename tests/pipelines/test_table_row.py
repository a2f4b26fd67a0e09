"""Rows of a table without Spark: what becomes of each value."""

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.types import (
    DataType,
    DateType,
    DecimalType,
    IntegerType,
    StringType,
    StructType,
    TimestampType,
)

from ringspark.pipelines.kinds import TableColumn, TableRow
from ringspark.pipelines.kinds.table_row import NULL_WORD


def struct(day: DataType, number: DataType) -> StructType:
    return StructType().add("day", day).add("n", number)


def test_infinities_are_missing_and_far_numbers_are_clipped() -> None:
    column = TableColumn(name="x", center=1.0, scale=2.0, low=-3.0, high=3.0)
    numbers = column.numbers_of(np.array([3.0, np.inf, -np.inf, np.nan, 1e300]))[:, 0]
    np.testing.assert_array_equal(numbers, np.array([1.0, np.nan, np.nan, np.nan, 3.0], np.float32))


def test_a_missing_string_has_an_id_of_its_own() -> None:
    column = TableColumn(name="x", form="words", words=("a", "b", NULL_WORD))
    assert column.ids_of(pa.array(["b", None, "new", "a"])).tolist() == [2, 3, 0, 1]


def test_counts_of_other_bins_are_refused() -> None:
    assert TableColumn(name="x", edges=(0.0,), counts=(3, 1, 2)).num_counts == 3
    with pytest.raises(ValueError, match="column 'x' needs 3 counts, got 2"):
        TableColumn(name="x", edges=(0.0,), counts=(3, 1))


def test_a_timestamp_is_read_on_the_clock_of_the_training() -> None:
    noon = np.array([1_577_880_000.0, np.nan])  # 2020-01-01 12:00 in UTC
    for zone, hour in (("UTC", 12), ("Asia/Tokyo", 21), ("America/New_York", 7)):
        column = TableColumn(
            name="x", form="calendar", zone=zone, parts=("hour",), has_trend=False, high=1e10
        )
        turn = column.numbers_of(noon)
        assert turn[0, 0] == pytest.approx(hour / 24 * 4 - 2)
        assert np.isnan(turn[1]).all()


def test_a_field_is_not_mistaken_for_a_column_with_a_dot() -> None:
    inside, outside = TableColumn(name="s", path=("x",)), TableColumn(name="s.x")
    assert inside.source != outside.source


def test_a_column_of_another_type_is_refused() -> None:
    row = TableRow((TableColumn(name="day", type="date", form="calendar"), TableColumn(name="n", type="int")))
    assert row.adopt("row", struct(DateType(), DecimalType(3, 1))) == row
    with pytest.raises(ValueError, match="'day' was trained as date and is now timestamp; cast it to date"):
        row.adopt("row", struct(TimestampType(), IntegerType()))
    with pytest.raises(ValueError, match="'n' was trained as int and is now string; cast it to int"):
        row.adopt("row", struct(DateType(), StringType()))
