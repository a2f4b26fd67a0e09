"""`model.compare_inputs`: how far the columns of new rows are from the training rows."""

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import functions as F

from ringspark.estimators import TorchClassifier
from ringspark.estimators.columns.inputs import ModelInput
from ringspark.extras.tables.drift import (
    count_batch,
    counted_table,
    drifts_of,
    stability_index,
    wasserstein,
    with_counts,
)
from ringspark.models import ModelSpec
from ringspark.pipelines.columns import Column
from ringspark.pipelines.kinds import TableColumn, TableRow

NUMBER = TableColumn(name="n", center=10.0, scale=2.0, edges=(-1.0, 0.0, 1.0))
WORD = TableColumn(name="w", type="string", form="words", words=("a", "b"))


def struct(kind: TableRow, **values: Any) -> pa.StructArray:
    arrays = [pa.array(values[column.name]) for column in kind.columns]
    return pa.StructArray.from_arrays(arrays, [column.source for column in kind.columns])


def drift_of(column: TableColumn, before: Any, now: Any) -> Any:
    """Returns the drift of one column, from its values in the training and now."""
    kind = TableRow((column,))
    kind = with_counts(kind, count_batch(kind, struct(kind, **{column.name: before})))
    (found,) = drifts_of(kind, count_batch(kind, struct(kind, **{column.name: now})))
    return found


def test_rows_are_counted_by_bin_by_name_and_without_a_value() -> None:
    kind = TableRow((NUMBER, WORD))
    numbers, words = [7.0, 8.0, 11.0, np.nan, np.inf, None, 1e300], ["b", None, "new", "a", "b", "x", "b"]
    rows, totals = count_batch(kind, struct(kind, n=numbers, w=words))
    assert rows.tolist() == [1, 1, 1, 1, 3, 2, 1, 3, 1]
    assert totals[:5].tolist() == [-1.5, -1.0, 0.5, 1e6, 0]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-50, 50) | st.none(), min_size=1), st.integers(1, 3))
def test_the_training_rows_have_no_drift(values: list[float | None], times: int) -> None:
    given = pa.array(values, pa.float64())
    found = drift_of(NUMBER, given, pa.concat_arrays([given] * times))
    assert (found.missing, found.psi < 0.3 * (times - 1) + 1e-12) == (found.missing_before, True)
    assert found.wasserstein < 1e-9 or set(values) == {None}


def test_a_shift_is_measured_in_standard_deviations() -> None:
    draw = np.random.default_rng(0)
    column = replace(NUMBER, edges=tuple(np.linspace(-2, 2, 31).tolist()))
    before, now = draw.normal(10, 2, 20_000), draw.normal(11, 2, 20_000)
    found = drift_of(column, before, now)
    assert found.wasserstein == pytest.approx(0.5, abs=0.03)
    # Two normal distributions half a standard deviation apart.
    assert found.psi == pytest.approx(0.25, abs=0.02)
    assert drift_of(column, before, now * 1000).wasserstein == pytest.approx(5495, rel=0.01)


@settings(max_examples=30, deadline=None)
@given(
    *[st.lists(st.tuples(st.floats(-9, 9), st.integers(1, 9)), min_size=1, max_size=6)] * 2,
)
def test_the_distance_is_the_mean_step_between_the_sorted_rows(first: Any, second: Any) -> None:
    (points, weights), (others, other_weights) = (np.array(each, float).T for each in (first, second))
    found = wasserstein(points, weights, others, other_weights)
    # As many rows on both sides.
    rows = np.sort(np.repeat(points, (weights * other_weights.sum()).astype(int)))
    other_rows = np.sort(np.repeat(others, (other_weights * weights.sum()).astype(int)))
    assert found == pytest.approx(np.abs(rows - other_rows).mean(), abs=1e-9)


def test_unknown_names_and_missing_values_are_shares_of_the_rows() -> None:
    found = drift_of(WORD, ["a", "b", "b", "c"], ["a", "x", "y", "z", None])
    assert (found.unknown_before, found.unknown) == (0.25, 0.6)
    assert (found.missing_before, found.missing) == (0.0, 0.2)
    assert np.isnan(found.wasserstein)


def test_many_names_are_compared_in_groups_so_that_few_rows_have_little_noise() -> None:
    names = [f"name {number:04}" for number in range(5_000)]
    column = replace(WORD, words=tuple(names))
    before = np.repeat(names, 20)
    sample = np.random.default_rng(0).choice(before, 2_000)
    assert drift_of(column, before, sample).psi < 0.05
    # A few of the names, all of which are rare.
    assert drift_of(column, before, before[:2_000]).psi > 1


def test_an_empty_bin_does_not_make_the_index_infinite() -> None:
    assert 0.5 < stability_index(np.array([5, 5, 0]), np.array([0, 5, 5])) < 5


def test_a_model_without_counts_is_refused() -> None:
    column = Column(name="t", kind=TableRow((NUMBER,)))
    with pytest.raises(ValueError, match="which models of earlier versions of ringspark do not have"):
        counted_table(
            [ModelInput(column=column, part=part) for part in (".numbers", ".ids")], "compare_inputs"
        )


@pytest.mark.spark
@pytest.mark.modes
@pytest.mark.usefixtures("interpreter")
def test_the_shifted_column_comes_first(spark: Any) -> None:
    frame = spark.range(0, 4_000, 1, 2).selectExpr(
        "id", "randn(1) * 3 AS x", "rand(2) AS y", "concat('w', int(id % 7)) AS word",
        "IF(rand(3) < 0.1, NULL, id % 3) AS few", "array(randn(4)) AS v", "int(rand(5) < 0.5) AS label",
        "date_add(DATE'2024-01-01', int(id % 90)) AS day", "id % 5 = 0 AS held",
    ).cache()  # fmt: skip
    network = ModelSpec("tabpack", {"rates": [1.0], "dropouts": [0.0], "width": 4, "depth": 1})
    stage = TorchClassifier(
        model=network,
        epochs=1,
        inputCols=["x", "y", "word", "few", "v", "day"],
        validationIndicatorCol="held",
    )
    model = stage.fit(frame)
    same = model.compare_inputs(frame.where("not held"))
    assert (same.psi < 1e-9).all()
    assert set(same.column) == {"x", "y", "word", "few", "v[0]", "day"}
    found = model.compare_inputs(frame.withColumns({"y": F.col("y") + 0.2, "word": F.concat("word", "word")}))
    assert found.column.tolist()[:2] == ["word", "y"]
    by_name = found.set_index("column")
    assert (by_name.unknown_before["word"], by_name.unknown["word"]) == (0, 1)
    assert by_name.wasserstein["y"] == pytest.approx(0.2 * 12**0.5, rel=0.2)
    assert by_name.missing_before["few"] == pytest.approx(0.1, abs=0.02)
    moved = frame.withColumn("y", F.col("y") + 0.2)
    later = TorchClassifier(initialModel=model, epochs=1, validationIndicatorCol="held").fit(moved)
    assert (later.compare_inputs(moved.where("not held")).psi < 1e-9).all()
    with pytest.raises(ValueError, match="compare_inputs needs rows, got none"):
        model.compare_inputs(frame.limit(0))
