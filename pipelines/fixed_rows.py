"""`fix_rows`: returns a DataFrame that has the same rows in every job.

Spark computes a DataFrame again in each job. Random numbers, Python functions, and sums of doubles in the
order in which a shuffle delivers them may then give other rows. If one job splits the rows by a hash, or
measures the training rows, and another job uses them, held-out rows are trained on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringspark.pipelines.spark_errors import explain_worker_errors
from ringspark.pipelines.spark_plans import is_repeatable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def fix_rows(df: DataFrame) -> DataFrame:
    """Returns `df` if its plan is repeatable, else a job copies its rows to the executors' memory or disks.

    Spark deletes the copy when nothing refers to it. If an executor dies, the next job fails. Spark Connect
    before 4.0 computes lost rows again.
    """
    if is_repeatable(df):
        return df
    from pyspark.errors import PySparkNotImplementedError

    try:
        with explain_worker_errors():
            return df.localCheckpoint()
    except PySparkNotImplementedError:  # Spark Connect before 4.0
        return df.persist()
