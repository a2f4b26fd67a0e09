"""`batch_that_fits` finds the micro-batch that fits into a real memory limit."""

import logging
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from pyspark.sql import functions as F
from spark_tables import no_job
from torch import nn

from ringspark.estimators import TorchRegressor, WorkerError
from ringspark.estimators.failures import Failure
from ringspark.extras.tuning import batch_that_fits
from ringspark.models import ModelSpec

MIB = 1 << 20


class Hungry(nn.Linear):
    """Needs 64 MiB of address space per row in a process with 600 MiB left: 8 rows fit, 16 do not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is torch.Tensor and x.device.type == "cpu":  # unlike the plan's
            before = resource.getrlimit(resource.RLIMIT_AS)
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + 600 * MIB, before[1]))
            try:
                torch.empty(len(x), 64 * MIB, dtype=torch.uint8)
            finally:
                resource.setrlimit(resource.RLIMIT_AS, before)
        return super().forward(x)


def table(spark: Any, rows: int = 640) -> Any:
    return spark.range(0, rows, 1, 2).select(
        F.array(F.sin("id")).alias("features"),
        F.cos("id").alias("label"),
        (F.col("id") % 5 == 0).alias("held"),
    )


def regressor(folder: Path, *hidden: int, **params: Any) -> TorchRegressor:
    """Returns an estimator of a `Hungry` network, or of one with hidden layers."""
    mlp = ModelSpec("mlp", {"in_features": 1, "hidden": hidden, "out_features": 1})
    sizes = {"model": mlp if hidden else Hungry(1, 1), "batchSize": 64, "numWorkers": 2}
    return TorchRegressor(**sizes | params, collective="torch", storageUri=str(folder), showProgress=False)


@pytest.mark.spark
@pytest.mark.slow
def test_the_batch_is_cut_until_a_real_limit_holds_it(spark: Any, tmp_path: Path, caplog: Any) -> None:
    rows = table(spark)
    whole = regressor(tmp_path, validationIndicatorCol="held")
    with caplog.at_level(logging.WARNING, "ringspark"):
        found = batch_that_fits(whole, rows)
    assert (found.gradient_accumulation, found.rows) == (4, 8)
    assert list(found.tries["gradient_accumulation"]) == [1, 2, 4]
    assert ["memory" in outcome for outcome in found.tries["outcome"]] == [True, True, False]
    assert "micro-batches of 32 rows per worker do not fit" in caplog.text
    assert "trying 8 rows, gradientAccumulation=4" in caplog.text
    assert whole.getGradientAccumulation() == 1
    assert str(found) == "micro-batches of 8 rows per worker fit: batchSize=64 with gradientAccumulation=4"
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(WorkerError, match="memory"):
        whole.setMaxRestarts(0).fit(rows)
    assert found.estimator.fit(rows).summary.steps == 8


@pytest.mark.spark
@pytest.mark.slow
def test_a_smallest_part_too_large_and_another_error_end_the_search(spark: Any, tmp_path: Path) -> None:
    hopeless = regressor(tmp_path, 64, batchSize=7)
    with pytest.raises(ValueError, match=r"of 2 rows on a worker, does not fit its memory .*is 1000 B\)"):
        batch_that_fits(hopeless, table(spark, 32), 1000)
    diverges = regressor(tmp_path, model=nn.Linear(1, 1), optimizer="sgd", learningRate=1e38)
    with pytest.raises(WorkerError, match="finite"):
        batch_that_fits(diverges, table(spark))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.spark
@pytest.mark.slow
def test_what_the_plan_rules_out_is_not_tried(spark: Any, tmp_path: Path) -> None:
    estimator = regressor(tmp_path, 256, 256, batchSize=512, numWorkers=1)
    everything = batch_that_fits(estimator, table(spark), "1g")
    assert list(everything.tries["outcome"]) == ["fits"]
    most = int(everything.tries["planned_bytes"][0])
    found = batch_that_fits(estimator, table(spark), most - 1)
    assert found.gradient_accumulation == 2
    assert found.tries["outcome"][0].startswith("the plan needs")
    assert found.tries["planned_bytes"][1] < most


@pytest.mark.spark
@pytest.mark.slow
def test_workers_of_one_replica_have_the_same_rows(spark: Any, tmp_path: Path) -> None:
    found = batch_that_fits(regressor(tmp_path, 64, 64, parallelism={"tensor": 2}), table(spark), "1g")
    assert (found.gradient_accumulation, found.rows) == (1, 64)
    with pytest.raises(ValueError, match=r"of 1 rows on a worker, does not fit its memory .*is 1000 B\)"):
        batch_that_fits(found.estimator, table(spark), 1000)


@pytest.mark.spark
def test_bad_input_is_refused_in_one_sentence(spark: Any, tmp_path: Path) -> None:
    for arguments, message in (
        (("mlp", table(spark)), r"needs an estimator of ringspark, .* got str"),
        ((regressor(tmp_path), table(spark), "much"), "budget must be bytes as an int or .* such as '4g'"),
        ((regressor(tmp_path), table(spark).where("label > 2")), "needs training rows, got none"),
    ):
        with pytest.raises(ValueError, match=message):
            batch_that_fits(*arguments)
    with no_job(spark), pytest.raises(ValueError, match="metrics of a regression must be among"):
        batch_that_fits(TorchRegressor(metrics=["auroc"]), table(spark))


def test_an_allocation_that_failed_is_told_from_other_errors() -> None:
    for allocate in (lambda: bytearray(1 << 60), lambda: torch.empty(1 << 50, dtype=torch.uint8)):
        with pytest.raises((MemoryError, RuntimeError)) as caught:
            allocate()  # more than any machine has
        assert Failure.of(caught.value, 0, "training", from_peer=False).is_out_of_memory
    for other in (RuntimeError("shapes do not match"), ValueError("not enough memory")):
        assert not Failure.of(other, 0, "training", from_peer=False).is_out_of_memory


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:left out of the table:UserWarning")
def test_a_table_without_a_model_takes_the_batch_of_its_recipe(spark: Any, tmp_path: Path) -> None:
    rows = spark.range(0, 400, 1, 2).selectExpr("id AS day", "sin(id) AS x", "cos(id) AS label")
    plain = TorchRegressor(labelCol="label", timeCol="day", storageUri=str(tmp_path), showProgress=False)
    found = batch_that_fits(plain, rows, "1g")
    assert list(found.tries["outcome"]) == ["fits"]
    assert found.tries["planned_bytes"][0] > 0
    assert found.rows == found.estimator.getBatchSize() == 32
    assert not found.estimator.isDefined("model")
    assert list(tmp_path.iterdir()) == []
