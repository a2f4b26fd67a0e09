"""The learning-rate range test finds a known largest stable rate, and suggests a rate that trains."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import functions as F
from spark_tables import no_job

from ringspark.estimators import TorchRegressor
from ringspark.extras.tuning import lr_range_test
from ringspark.extras.tuning.rate_range import rate_range
from ringspark.models import ModelSpec


def test_the_judgement_of_a_sweep_with_noise() -> None:
    rates = np.geomspace(1e-5, 10, 120)
    noise = np.random.default_rng(0).normal(0, 0.02, 120)
    # The loss falls around 1e-3, is flat to 0.5, then rises.
    losses = 0.3 + 0.7 / (1 + (rates / 1e-3) ** 2) + (rates / 0.5) ** 4 + noise
    found = rate_range(list(rates), list(losses))
    assert 3e-4 < found.suggestion < 3e-3
    assert 0.25 < found.diverges_at < 1.0
    spoilt = losses.copy()
    spoilt[[0, 5, 6, 7, 8, 9, 10, 11]] = np.nan, *[np.inf] * 7  # batches that the sweep has skipped
    again = rate_range(list(rates), list(spoilt))
    assert again.suggestion == pytest.approx(found.suggestion, rel=0.3)
    assert again.diverges_at == found.diverges_at
    ended = rate_range(list(rates), [*losses[:90], *[np.nan] * 30])
    assert ended.diverges_at == pytest.approx(rates[89])
    assert rate_range(list(rates), [np.nan] * 120).suggestion is None
    assert rate_range(list(rates), list(0.3 + 0.7 / (1 + rates))).diverges_at is None
    assert rate_range(list(rates), list(1.0 + rates)).suggestion is None


@pytest.mark.spark
@pytest.mark.slow
def test_a_quadratic_diverges_where_it_must(spark: Any, tmp_path: Path) -> None:
    rows = spark.range(0, 512, 1, 2).selectExpr("id", "2.0 * sin(id) AS a", "cos(1.7 * id) AS b")
    # Noise keeps the weights moving. Without it they converge, and nothing remains to grow at large rates.
    rows = rows.withColumn("label", F.expr("3 * a - 2 * b + 1 + 0.5 * sin(7.3 * id * id)")).cache()
    x = np.array([[r.a, r.b, 1.0] for r in rows.collect()])
    stable = 2 / np.linalg.eigvalsh(2 * x.T @ x / len(x)).max()
    estimator = TorchRegressor(
        model=ModelSpec("linear", {"in_features": 2, "out_features": 1}),
        featuresCol="features", optimizer="sgd", batchSize=32, collective="torch",
        reader="arrow", storageUri=str(tmp_path), showProgress=False, numWorkers=2,
    )  # fmt: skip
    data = rows.withColumn("features", F.array("a", "b"))
    found = lr_range_test(estimator, data, 1e-4, 100.0, 120)
    assert stable / 2 < found.diverges_at < 2 * stable
    assert found.suggestion < found.diverges_at
    assert len(found.table) < 120  # ended early
    assert list(tmp_path.iterdir()) == []
    assert found.plot().get_xscale() == "log"
    model = estimator.setParams(learningRate=found.suggestion, epochs=30).fit(data)
    history = model.summary.history["train_loss"]
    assert history.iloc[-1] < history.iloc[0] / 2


@pytest.mark.spark
def test_bad_input_is_refused_in_one_sentence(spark: Any) -> None:
    df = spark.range(4)
    network = ModelSpec("linear", {"in_features": 1, "out_features": 1})
    estimator = TorchRegressor(model=network)
    own = TorchRegressor(model=network, optimizer=lambda parameters: None)
    for arguments, message in (
        (("x", df), r"needs an estimator of ringspark, .* got str"),
        ((estimator, df, 1, 1), "lowest must be below highest, got 1 and 1"),
        ((estimator, df, 1, np.nan), "highest must be above 0 and finite, got nan"),
        ((estimator, df, 1e-6, 1.0, 5), "steps must be at least 10, got 5"),
        ((own, df), "needs the name of an optimizer"),
    ):
        with pytest.raises(ValueError, match=message):
            lr_range_test(*arguments)
    with no_job(spark), pytest.raises(ValueError, match="metrics of a regression must be among"):
        lr_range_test(TorchRegressor(metrics=["auroc"]), df.selectExpr("id AS x", "id AS label"))


@pytest.mark.spark
@pytest.mark.slow
def test_a_table_without_a_model_is_swept(spark: Any, tmp_path: Path) -> None:
    rows = spark.range(0, 400, 1, 2).selectExpr("sin(id) AS x", "cos(id) AS label")
    plain = TorchRegressor(labelCol="label", storageUri=str(tmp_path), showProgress=False)
    found = lr_range_test(plain, rows, steps=20)
    assert found.suggestion is not None
    assert list(tmp_path.iterdir()) == []
