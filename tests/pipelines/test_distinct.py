from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspark.pipelines.distinct import SIZE, DistinctSketch


@given(values=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=200), cuts=st.integers(1, 5))
def test_few_values_are_counted_exactly(values: list[int], cuts: int) -> None:
    sketch = DistinctSketch()
    for part in np.array_split(np.array(values, dtype=np.int64), cuts):
        sketch = sketch.merge(DistinctSketch().add(part))
    assert sketch.count == len(set(values))


@pytest.mark.parametrize("count", [300, 5_000, 400_000])
@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("dtype", ["int64", "float64", "int32"])
def test_many_values_are_estimated(count: int, repeats: int, dtype: str) -> None:
    values = np.tile(np.arange(count).astype(dtype), repeats)
    sketch = DistinctSketch()
    for start in range(0, len(values), 10_000):
        sketch = sketch.add(values[start : start + 10_000])
    # Four standard errors.
    assert sketch.count == pytest.approx(count, rel=4 / SIZE**0.5)
    assert DistinctSketch.from_text(sketch.to_text()).count == sketch.count


def test_any_order_and_any_cut_gives_the_same_sketch() -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(0, 50_000, 100_000)
    whole = DistinctSketch().add(values)
    parts = DistinctSketch()
    for part in np.array_split(rng.permutation(values), 37):
        parts = parts.add(part)
    assert np.array_equal(whole.hashes, parts.hashes)


def test_both_zeros_are_one_value() -> None:
    assert DistinctSketch().add(np.array([0.0, -0.0])).count == 1
