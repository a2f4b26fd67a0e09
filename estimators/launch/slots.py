"""How many gang members the cluster can run at the same time.

A barrier stage that needs more tasks than there are slots is not refused by Spark at once: it
checks again for minutes. So the driver asks first.
"""

from __future__ import annotations

import re
from typing import Any

from pyspark.sql import SparkSession


def is_remote(spark: SparkSession) -> bool:
    """Whether `spark` is a Spark Connect session, without a JVM in this process."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def count_slots(spark: SparkSession) -> int:
    """Tasks that can run at the same time now."""
    if not is_remote(spark):
        context: Any = spark.sparkContext._jsc.sc()
        profile = context.resourceProfileManager().resourceProfileFromId(0)
        return int(context.maxNumConcurrentTasks(profile))
    slots = slots_of_master(spark.conf.get("spark.master", "") or "")
    if slots is not None:
        return slots
    # Without a JVM: an unpartitioned range has as many partitions as the cluster's default
    # parallelism, which is the number of cores on every cluster manager.
    from pyspark.sql.functions import spark_partition_id

    return spark.range(1 << 16).select(spark_partition_id()).distinct().count()


def slots_of_master(master: str) -> int | None:
    """Slots of `local[...]` and `local-cluster[...]` masters, None for the others."""
    if match := re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,.*\]", master):
        return int(match[1]) * int(match[2])
    if match := re.fullmatch(r"local\[\s*(\d+)\s*(?:,.*)?\]", master):
        return int(match[1])
    return 1 if master == "local" else None


def check_slots(spark: SparkSession, num_workers: int) -> None:
    """Refuses a gang larger than the cluster.

    Raises:
        ValueError: With both numbers.
    """
    slots = count_slots(spark)
    if num_workers > slots:
        raise ValueError(
            f"numWorkers ({num_workers}) must not exceed the {slots} task slots of the cluster "
            f"({spark.conf.get('spark.master', 'unknown master')}), since all workers run at the same time; "
            "lower numWorkers or add executor cores"
        )
