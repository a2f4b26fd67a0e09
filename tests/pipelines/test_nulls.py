import datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspark.pipelines.nulls import fill_nulls, null_rows

DAY = datetime.date(2020, 1, 2)
MOMENT = datetime.datetime(2020, 1, 2, 3)

nested = st.lists(
    st.one_of(st.none(), st.lists(st.one_of(st.none(), st.lists(st.one_of(st.none(), st.integers(0, 3))))))
)


def _holds_null(value: Any) -> bool:
    return value is None or (isinstance(value, list) and any(map(_holds_null, value)))


@given(rows=nested, skip=st.integers(0, 3))
def test_a_row_is_null_when_anything_in_it_is(rows: list[Any], skip: int) -> None:
    values = pa.array(rows, pa.list_(pa.list_(pa.int64()))).slice(skip)
    found = null_rows(values)
    expected = [_holds_null(row) for row in rows[skip:]]
    assert (found.tolist() if found is not None else [False] * len(expected)) == expected


@given(rows=nested)
def test_filled_lists_hold_no_null(rows: list[Any]) -> None:
    filled = fill_nulls(pa.array(rows, pa.list_(pa.list_(pa.int64()))))
    assert filled.to_pylist() == [[[one or 0 for one in inner or []] for inner in row or []] for row in rows]


@pytest.mark.parametrize(
    ("data_type", "value", "zero"),
    [
        (pa.int8(), 1, 0),
        (pa.float64(), 1.5, 0.0),
        (pa.bool_(), True, False),
        (pa.string(), "a", ""),
        (pa.binary(), b"a", b""),
        (pa.date32(), DAY, datetime.date(1970, 1, 1)),
        (pa.timestamp("us"), MOMENT, datetime.datetime(1970, 1, 1)),
    ],
)
def test_every_type_has_a_zero(data_type: Any, value: Any, zero: Any) -> None:
    filled = fill_nulls(pa.array([None, value], data_type))
    assert filled.type == data_type
    assert filled.to_pylist() == [zero, value]
