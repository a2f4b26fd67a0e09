"""`fix_rows`: returns a DataFrame that has the same rows in every job.

Spark computes a DataFrame again in each job. Random numbers, Python functions, and sums of doubles in the
order in which a shuffle delivers them may then give other rows. If one job splits the rows by a hash, or
measures the training rows, and another job uses them, held-out rows are trained on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringspark.pipelines.reuse.plan_fingerprint import is_repeatable
from ringspark.pipelines.spark_errors import explain_worker_errors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def fix_rows(df: DataFrame) -> DataFrame:
    """Returns `df` if its plan always gives the same rows, else a copy on the executors' disks. Runs a job.

    Spark removes the copy with the last reference to it. If an executor is lost with a part of the copy, the
    next job fails instead of computing other rows.
    """
    if is_repeatable(df):
        return df
    from pyspark.errors import PySparkNotImplementedError

    try:
        with explain_worker_errors():
            return df.localCheckpoint()
    except PySparkNotImplementedError:  # Spark Connect before 4.0
        return df.persist()
