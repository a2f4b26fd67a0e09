"""Sets the names of Spark jobs in Spark's UI."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ringspark.pipelines.spark_paths import is_remote

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_DESCRIPTION = "spark.job.description"


@contextmanager
def name_jobs(spark: SparkSession, name: str) -> Iterator[None]:
    """Names the Spark jobs of this thread "ringspark: <name>". Does nothing on Spark Connect."""
    if is_remote(spark):
        yield
        return
    context: Any = spark.sparkContext
    before = context.getLocalProperty(_DESCRIPTION)
    context.setLocalProperty(_DESCRIPTION, f"ringspark: {name}")
    try:
        yield
    finally:
        with suppress(Exception):  # a stopped session must not hide the error of its job
            context.setLocalProperty(_DESCRIPTION, before)
