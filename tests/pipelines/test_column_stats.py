import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspark.pipelines.column_stats import ColumnStats, measure
from ringspark.pipelines.typed_json import record

lists = st.lists(st.floats(width=32), max_size=30)


def _stats(*parts: Any, scalar: bool = True) -> ColumnStats:
    stats = ColumnStats()
    for part in parts:
        stats = stats.merge(measure(len(part), np.asarray(part), is_scalar=scalar))
    return stats


@given(parts=st.lists(lists, max_size=4))
def test_merged_parts_equal_the_whole(parts: list[list[float]]) -> None:
    merged = ColumnStats()
    for part in parts:
        merged = merged.merge(_stats(np.array(part, dtype=np.float32)))
    whole = [value for part in parts for value in part]
    finite = [value for value in whole if math.isfinite(value)]
    assert merged.rows == merged.values == len(whole)
    assert merged.nans == sum(map(math.isnan, whole))
    assert merged.infs == sum(map(math.isinf, whole))
    assert merged.minimum == (min(finite) if finite else None)
    assert merged.maximum == (max(finite) if finite else None)
    if finite:
        assert merged.mean == pytest.approx(np.mean(finite), rel=1e-6, abs=1e26)
    else:
        assert merged.mean is None
    if len(finite) > 1:
        assert merged.std == pytest.approx(np.std(finite, ddof=1), rel=1e-6, abs=1e26)
    else:
        assert merged.std is None


def test_the_deviation_survives_a_large_mean() -> None:
    values = 1e9 + np.arange(200_000) % 7
    assert _stats(values[:70_000], values[70_000:]).std == pytest.approx(values.std(ddof=1), rel=1e-9)


def test_large_integers_stay_exact() -> None:
    stats = _stats(np.array([2**62 + 1, -(2**62) - 1]))
    assert (stats.minimum, stats.maximum) == (-(2**62) - 1, 2**62 + 1)
    again = record(ColumnStats, json.loads(json.dumps(vars(stats))))
    assert again == stats


def test_booleans_count_as_zero_and_one() -> None:
    stats = _stats(np.array([True, False, True, True]))
    assert (stats.minimum, stats.maximum, stats.mean) == (0, 1, 0.75)


def test_fractions_are_counted_for_scalars_only() -> None:
    values = np.array([1.0, 1.5, math.nan, math.inf, -2.25])
    assert _stats(values).fractional == 2
    assert _stats(values, scalar=False).fractional == 0


def test_no_rows_have_no_range() -> None:
    assert _stats(np.zeros(0)) == ColumnStats()


def test_rows_of_arrays_are_counted_apart_from_their_elements() -> None:
    stats = measure(2, np.arange(6), is_scalar=False)
    assert (stats.rows, stats.values, stats.mean) == (2, 6, 2.5)


def test_statistics_of_huge_doubles_are_finite_or_unknown() -> None:
    huge = [np.array([1.7e308] * 3), np.array([-1.7e308, 1.7e308]), np.array([1e200, 3e200])]
    for stats in (_stats(*huge[:1]), _stats(*huge), _stats(np.concatenate(huge)), _stats(huge[2], [1.0])):
        assert stats.mean is not None
        assert math.isfinite(stats.mean)
        assert stats.deviations is None or math.isfinite(stats.deviations)
    assert _stats(huge[0]).mean == pytest.approx(1.7e308)
    assert _stats(*huge).mean == pytest.approx(np.mean(np.concatenate(huge) / 1e100) * 1e100)
    assert _stats(huge[2], [1.0]).std is None
    assert _stats([1e145, 3e145]).std == pytest.approx(math.sqrt(2) * 1e145)
    assert _stats([1.0, 2.0], np.zeros(0), huge[0], [1.0]).std is None
