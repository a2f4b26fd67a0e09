"""Any table that people have: `fit` without a model trains on it, or refuses it in one sentence.

A column is used, or left out for a reason. A model's predictions for a row depend on the row alone. The cases
come from `awkward_tables`; RINGSPARK_TEST_TABLES sets their number, such as 5000 for a search by hand, and
RINGSPARK_TEST_TABLES_SEED the seed.
"""

import os
import re
import warnings
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from awkward_tables import ID, LABEL, ROWS, AwkwardTable, settings_of, tables
from hypothesis import HealthCheck, given, seed, settings
from pyspark.ml.functions import vector_to_array
from pyspark.sql import functions as F

from ringspark.estimators import TorchClassifier, TorchRegressor
from ringspark.estimators.checked_fit import CheckedFit
from ringspark.estimators.prepared_fit import TABLE_COLUMN, PreparedFit, prepare_fit
from ringspark.models import ModelSpec
from ringspark.pipelines.columns import quote

pytestmark = pytest.mark.spark

CASES = int(os.environ.get("RINGSPARK_TEST_TABLES", "5"))
SEED = int(os.environ.get("RINGSPARK_TEST_TABLES_SEED", "58"))
# A fit takes as long as many plans.
FITS = max(4, CASES // 20)

SMALL = {"rates": [1.0], "dropouts": [0.0], "width": 4, "depth": 1, "number_width": 1, "category_width": 1}
# Marks of an error that is not ours: its classes, conditions and stack traces.
FOREIGN = re.compile(r"SQLSTATE|org\.apache|java\.|[Pp]y4j|[Pp]yarrow|Traceback|^\[[A-Z_.]+\]|\n")


def refusal(error: BaseException) -> str:
    """Returns the sentence of an error, and raises the error if it is none."""
    text = str(error)
    if not isinstance(error, ValueError | TypeError) or FOREIGN.search(text) or not 20 < len(text) < 900:
        raise error
    return text


def estimator_of(table: AwkwardTable, **params: Any) -> Any:
    kind = TorchClassifier if table.is_class else TorchRegressor
    names = {"labelCol": LABEL, "inputCols": [column.name for column in table.columns]}
    sizes = {"model": ModelSpec("tabpack", SMALL), "epochs": 1, "batchSize": 16, "collective": "local"}
    return kind(**names, **sizes, predictionCol="the prediction", **params)


def numbers_of(fit: PreparedFit, rows: Any, batch: int = ROWS) -> dict[int, Any]:
    """Returns what the network gets of each row, by number."""
    kind = fit.plan.kind
    found = kind.adopt(TABLE_COLUMN, rows.schema).select(None, rows.schema)
    table = rows.select(F.col(quote(ID)).alias("id"), found.alias("row")).toArrow()
    made = {}
    for part in table.to_batches(batch):
        (stored,) = kind.encode(part.column("row")).arrays
        decoded = kind.finish(TABLE_COLUMN, kind.decode([stored]))
        numbers, ids = (decoded[TABLE_COLUMN + suffix] for suffix in kind.suffixes)
        assert not np.isinf(numbers).any()
        assert (ids >= 0).all()
        assert (ids < np.array(kind.cardinalities, dtype=np.int64)).all()
        for row, *values in zip(part.column("id").to_pylist(), numbers, ids, strict=True):
            made[row] = values
    return made


def check_equal(found: dict[int, Any], expected: dict[int, Any]) -> None:
    assert sorted(found) == sorted(expected) == list(range(ROWS))
    for row, values in expected.items():
        for one, other in zip(found[row], values, strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_row_gives_the_same_numbers_wherever_it_is(spark: Any) -> None:
    counts: Counter[str] = Counter()

    @seed(SEED)
    @settings(max_examples=CASES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(table=tables())
    def check(table: AwkwardTable) -> None:
        counts["cases"] += 1
        with settings_of(spark, table), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows = table.make(spark)
            try:
                fit = prepare_fit(estimator_of(table), rows)
                CheckedFit.of(fit.estimator, fit.dataset)
            except Exception as error:
                refusal(error)
                counts["refused"] += 1
                return
        counts["planned"] += 1
        for column in table.columns:
            names = f"{column.name}.", f"{column.name}["
            uses = [use for use in fit.uses if use.column == column.name or use.column.startswith(names)]
            assert uses, column
            assert all(use.reason for use in uses)
            counts.update("left out" if use.use == "left out" else "used" for use in uses)
        with settings_of(spark, table):
            expected = numbers_of(fit, rows)
            moved = rows.select(*map(quote, reversed(rows.columns))).repartition(7)
            check_equal(numbers_of(fit, moved, batch=5), expected)
        reads_texts = any(
            c.zone and c.type.startswith(("string", "char", "varchar")) for c in fit.plan.kind.columns
        )
        if not reads_texts:  # such a text has no zone of its own
            with settings_of(spark, table, zone="Pacific/Apia"):
                check_equal(numbers_of(fit, rows), expected)

    check()
    # The property says nothing if most cases are refused, or all columns left out.
    assert CASES < 20 or counts["refused"] > CASES / 50, counts
    assert min(counts["planned"], counts["used"], counts["left out"]) > CASES / 3, counts


@pytest.mark.slow
def test_a_row_has_the_same_prediction_wherever_it_is(spark: Any, tmp_path: Any) -> None:
    counts: Counter[str] = Counter()

    @seed(SEED)
    @settings(max_examples=FITS, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(table=tables(most=12))
    def check(table: AwkwardTable) -> None:
        with settings_of(spark, table), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows = table.make(spark)
            try:
                model = estimator_of(table, storageUri=str(tmp_path)).fit(rows)
            except Exception as error:
                refusal(error)
                counts["refused"] += 1
                return
            counts["trained"] += 1
            expected = predictions(model, rows)
            parts = vector_to_array(F.col("the contributions"))
            total = F.aggregate(parts, F.lit(0.0), lambda left, right: left + right)
            sums = predictions(model.copy().setContributionsCol("the contributions"), rows, total)
            if not table.is_class:
                np.testing.assert_allclose(sums, expected, rtol=1e-9, atol=1e-9 * np.abs(expected).max())
            assert np.isfinite(model.compare_inputs(rows).psi).all()
            moved = rows.select(*map(quote, reversed(rows.columns))).repartition(7)
            found = predictions(model.copy({model.inferenceBatchSize: 5}), moved)
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())

    check()
    assert counts["trained"] > FITS / 4


def predictions(model: Any, rows: Any, value: Any = None) -> Any:
    """Returns the prediction, or another value, of each row in the order of the rows, (ROWS,) float64."""
    value = F.col("the prediction") if value is None else value
    scored = model.transform(rows).select(F.col(quote(ID)).alias("id"), value.alias("p"))
    table: pa.Table = scored.toArrow().sort_by("id")
    assert table["id"].to_pylist() == list(range(ROWS))
    found = table["p"].to_numpy()
    assert np.isfinite(found).all()
    return found
