"""Fixtures that skip a test if Spark's own stages cannot run or be saved in this mode."""

import os

import pyspark
import pytest

MASTER = os.environ.get("RINGSPARK_TEST_MASTER", "local[4]")
IS_CONNECT = MASTER == "connect" or MASTER.startswith("sc://")
SPARK = tuple(int(part) for part in pyspark.__version__.split(".")[:2])
# Spark's own stages and evaluators are proxies of Java objects; Connect has none before 4.0.
SPARK_STAGES_RUN = not IS_CONNECT or SPARK >= (4, 0)


@pytest.fixture
def spark_stages() -> None:
    """Skips a test of Spark's own stages if Spark cannot run them here."""
    if not SPARK_STAGES_RUN:
        pytest.skip(f"pyspark {pyspark.__version__} has no pyspark.ml.feature on Spark Connect")


@pytest.fixture
def spark_saves() -> None:
    """Skips a test if Spark cannot save its own stages here."""
    if not SPARK_STAGES_RUN:
        pytest.skip(f"pyspark {pyspark.__version__} has no pyspark.ml.Pipeline.save on Spark Connect")
