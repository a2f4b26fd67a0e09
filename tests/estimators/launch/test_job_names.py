"""Jobs of the package have names in Spark's UI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from programs import run_program
from spark_stages import IS_CONNECT
from spark_tables import points

from ringspark.estimators import TorchRegressor
from ringspark.models import ModelSpec


@pytest.mark.spark
@pytest.mark.skipif(IS_CONNECT, reason="Spark Connect has no names of jobs")
def test_the_jobs_of_a_fit_are_named_and_the_callers_name_returns(spark: Any, tmp_path: Path) -> None:
    context, table = spark.sparkContext, points(spark, 40)
    store = context._jsc.sc().statusStore()
    context.setJobDescription("mine")
    try:
        before = store.jobsList(None).size()
        model = TorchRegressor(
            model=ModelSpec("linear", {"in_features": 3}),
            numWorkers=2,
            runUri=str(tmp_path / "flights"),
            metrics=["mse"],
        ).fit(table)
        model.evaluate(table)
        jobs = store.jobsList(None)
        names = [jobs.apply(i).description() for i in range(jobs.size() - before)]
        shown = {name.get() for name in names if name.isDefined()}
        assert {"ringspark: train flights, 2 workers", "ringspark: evaluate"} <= shown
        assert any(name.startswith("ringspark: write shards to ") for name in shown)
        assert "mine" not in shown
        assert context.getLocalProperty("spark.job.description") == "mine"
    finally:
        context.setJobDescription(None)


STOPS = """
from pyspark.sql import SparkSession
from ringspark.pipelines.job_names import name_jobs

spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
try:
    with name_jobs(spark, "stop"):
        spark.stop()
        raise RuntimeError("the job's own error")
except RuntimeError as error:
    print(error)
"""


@pytest.mark.spark
def test_the_error_of_a_job_is_shown_also_if_the_session_stopped(tmp_path: Path) -> None:
    assert run_program(STOPS, folder=tmp_path).stdout.splitlines()[-1] == "the job's own error"
