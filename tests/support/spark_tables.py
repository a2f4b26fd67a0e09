"""DataFrames of several test files, and conditions of the Spark session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

MASTER = os.environ.get("RINGSPARK_TEST_MASTER", "local[4]")
on_this_host = pytest.mark.skipif(not MASTER.startswith("local["), reason="needs workers on this host")


@contextmanager
def in_zone(spark: Any, name: str) -> Iterator[None]:
    """Context in which the session has another time zone."""
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", name)
    try:
        yield
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)


@contextmanager
def no_job(spark: Any) -> Iterator[None]:
    """Context that must run no Spark job."""
    tracker = spark.sparkContext.statusTracker()
    before = len(tracker.getJobIdsForGroup(None))
    yield
    assert len(tracker.getJobIdsForGroup(None)) == before


def points(spark: Any, rows: int, width: int = 3, partitions: int = 3) -> Any:
    """Returns `id`, `features` (an array of `width` normally distributed doubles) and `label`, their sum."""
    x = np.random.default_rng(3).normal(size=(rows, width))
    values = [(i, row.tolist(), float(row.sum())) for i, row in enumerate(x)]
    schema = "id long, features array<double>, label double"
    return spark.createDataFrame(values, schema).repartition(partitions, "id").cache()
