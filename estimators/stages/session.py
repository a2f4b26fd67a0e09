"""Reads a Spark session's conf and application id, on Spark Classic and on Spark Connect."""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession

from ringspark.pipelines.spark_paths import is_remote

# Conf keys that encrypt Spark's traffic over the network.
ENCRYPTION = ("spark.ssl.enabled", "spark.ssl.rpc.enabled", "spark.network.crypto.enabled")

# Read one by one: to list a conf takes Spark Classic three round trips per entry, and Spark Connect before
# 4.0 cannot list it.
_KEYS = (
    *ENCRYPTION,
    "spark.app.id",
    "spark.cores.max",
    "spark.driver.host",
    "spark.default.parallelism",
    "spark.dynamicAllocation.enabled",
    "spark.dynamicAllocation.executorIdleTimeout",
    "spark.dynamicAllocation.maxExecutors",
    "spark.executor.cores",
    "spark.executor.instances",
    "spark.executor.pyspark.memory",
    "spark.executor.resource.gpu.amount",
    "spark.master",
    "spark.python.daemon.module",
    "spark.python.use.daemon",
    "spark.sql.leafNodeDefaultParallelism",
    "spark.task.cpus",
    "spark.task.resource.gpu.amount",
)


def spark_conf(spark: SparkSession) -> dict[str, str]:
    """Returns the conf of the application, at least the keys that this package reads."""
    context: Any = None if is_remote(spark) else spark.sparkContext
    conf: Any = spark.conf if context is None else context._conf
    if context is None and hasattr(type(conf), "getAll"):
        return dict(conf.getAll)
    values = {key: conf.get(key, None) for key in _KEYS}
    return {key: value for key, value in values.items() if value is not None}


def application_of(spark: SparkSession) -> str:
    """Returns Spark's application id; all sessions of an application share its executors."""
    if is_remote(spark):
        return str(spark.conf.get("spark.app.id", ""))
    return str(spark.sparkContext.applicationId)
