"""Reads facts from Spark's plans on the driver, without a job, with Spark Classic and Spark Connect."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# The plan of a range without a given number of partitions shows the default parallelism.
_SPLITS = re.compile(r"\bsplits=(\d+)")
_SIZE = re.compile(r"sizeInBytes=([\d.E+]+) ([KMGTPE]?i?B)")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def estimate_bytes(df: DataFrame) -> float:
    """Returns Spark's estimate of the bytes of a DataFrame; infinity if Spark reports none.

    For a filter or a join the estimate is usually too large.
    """
    frame: Any = df
    try:
        if hasattr(frame, "_jdf"):
            return float(frame._jdf.queryExecution().optimizedPlan().stats().sizeInBytes())
        found = _SIZE.search(frame._explain_string(mode="cost"))
    except Exception:  # the JVM forbids access, or the plan has an error, which its first job reports
        return math.inf
    return float(found[1]) * 1024 ** _UNITS.index(found[2]) if found else math.inf


def default_parallelism(spark: SparkSession) -> int | None:
    """Returns the cores of all executors, unless the conf sets another number of partitions for `range`."""
    session: Any = spark
    if hasattr(session, "_jsparkSession"):
        return int(session.sparkContext.defaultParallelism)
    splits = _SPLITS.search(session.range(1)._explain_string())
    return int(splits[1]) if splits else None
