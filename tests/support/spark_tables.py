"""DataFrames of several test files."""

from __future__ import annotations

from typing import Any

import numpy as np


def points(spark: Any, rows: int, width: int = 3, partitions: int = 3) -> Any:
    """Returns `id`, `features` (an array of `width` normally distributed doubles) and `label`, their sum."""
    x = np.random.default_rng(3).normal(size=(rows, width))
    values = [(i, row.tolist(), float(row.sum())) for i, row in enumerate(x)]
    schema = "id long, features array<double>, label double"
    return spark.createDataFrame(values, schema).repartition(partitions, "id").cache()
