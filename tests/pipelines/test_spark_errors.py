"""A common failure of first runs: Spark's workers use another Python than the driver."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringspark.pipelines.spark_errors import explain_worker_errors

SCRIPT = """
from pyspark.sql import SparkSession
from ringspark.pipelines import write_shards
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
try:
    write_shards(spark.range(3), "shards")
except RuntimeError as error:
    print("REFUSED", error)
"""


@pytest.mark.slow
@pytest.mark.spark
def test_workers_without_the_package_are_explained(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    # -S starts this Python without its site-packages.
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        env=os.environ | {"PYSPARK_PYTHON": str(bare)},
        capture_output=True,
        text=True,
        check=False,
    )
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("REFUSED"))
    assert "Spark's Python workers cannot import" in line
    assert "set PYSPARK_PYTHON to that Python" in line
    assert not list(tmp_path.glob("shards/*"))


def test_other_errors_pass_unchanged() -> None:
    with pytest.raises(KeyError, match="other"), explain_worker_errors():
        raise KeyError("other")
