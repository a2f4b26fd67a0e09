"""Fixtures that skip a test if Spark's own stages cannot run or be saved here."""

from __future__ import annotations

import os

import pyspark
import pytest

MASTER = os.environ.get("RINGSPARK_TEST_MASTER", "local[4]")
IS_CONNECT = MASTER == "connect" or MASTER.startswith("sc://")
SPARK = tuple(int(part) for part in pyspark.__version__.split(".")[:2])
# Spark's own stages, evaluators included, are proxies of Java objects; until 4.0 Connect had none.
SPARK_STAGES_RUN = not IS_CONNECT or SPARK >= (4, 0)


@pytest.fixture
def spark_stages() -> None:
    """Skips a test that is about Spark's own stages where Spark cannot run them."""
    if not SPARK_STAGES_RUN:
        pytest.skip(f"pyspark {pyspark.__version__} has no pyspark.ml.feature on Spark Connect")


@pytest.fixture
def spark_saves() -> None:
    """Skips a test that saves a stage of Spark's around ours where Spark cannot save one."""
    if not SPARK_STAGES_RUN:
        pytest.skip(f"pyspark {pyspark.__version__} has no pyspark.ml.Pipeline.save on Spark Connect")
