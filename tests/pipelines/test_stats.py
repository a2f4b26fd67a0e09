from __future__ import annotations

import json
import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspark.pipelines.stats import ColumnStats, measure

values = st.lists(st.one_of(st.none(), st.floats(width=32)), max_size=30)


@given(parts=st.lists(values, max_size=4))
def test_merged_parts_equal_the_whole(parts: list[list[float | None]]) -> None:
    arrays = [pa.array(part, pa.float32()) for part in parts]
    merged = measure(pa.chunked_array(arrays, pa.float32()))
    whole = [value for part in parts for value in part]
    present = [value for value in whole if value is not None]
    finite = [value for value in present if math.isfinite(value)]
    assert merged.rows == len(whole)
    assert merged.nulls == len(whole) - len(present)
    assert merged.nans == sum(map(math.isnan, present))
    assert merged.infs == sum(map(math.isinf, present))
    assert merged.minimum == (min(finite) if finite else None)
    assert merged.maximum == (max(finite) if finite else None)
    if finite:
        assert merged.mean == pytest.approx(math.fsum(finite) / len(finite), rel=1e-9, abs=1e26)
    else:
        assert merged.mean is None


def test_large_integers_stay_exact() -> None:
    stats = measure(pa.array([2**62 + 1, -(2**62) - 1]))
    assert (stats.minimum, stats.maximum) == (-(2**62) - 1, 2**62 + 1)
    assert ColumnStats.from_json(json.loads(json.dumps(stats.to_json()))) == stats


def test_booleans_count_as_zero_and_one() -> None:
    stats = measure(pa.array([True, False, True, True]))
    assert (stats.minimum, stats.maximum, stats.mean) == (0, 1, 0.75)


def test_arrays_are_measured_over_elements_and_lengths() -> None:
    data = pa.array([[1.0, 2.0], None, [], [3.0, None, math.nan]], pa.list_(pa.float32()))
    stats = measure(data)
    assert (stats.rows, stats.nulls, stats.values, stats.nans) == (4, 2, 4, 1)
    assert (stats.min_length, stats.max_length) == (0, 3)
    assert (stats.minimum, stats.maximum, stats.mean) == (1.0, 3.0, 2.0)
    # A slice has offsets that do not start at zero.
    assert measure(data.slice(3)).min_length == 3


def test_no_rows_have_no_range() -> None:
    assert measure(pa.array([], pa.float64())) == ColumnStats()
    assert measure(pa.array([], pa.list_(pa.float64()))) == ColumnStats()


def test_every_kind_of_number_is_measured() -> None:
    for dtype in ("int8", "int16", "int32", "int64", "float32", "float64"):
        stats = measure(pa.array(np.array([3, 5], dtype=dtype)))
        assert (stats.minimum, stats.maximum, stats.total) == (3, 5, 8.0)
