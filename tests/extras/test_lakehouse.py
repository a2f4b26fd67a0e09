"""Tables that the Delta and Iceberg connectors of Spark wrote have the rows that the connectors read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[3] / "shared" / "lakehouse" / "check.py"

pytestmark = [pytest.mark.spark, pytest.mark.extras, pytest.mark.slow]


@pytest.mark.skipif(not CHECK.exists(), reason="the tables are not next to the repository")
def test_tables_of_sparks_own_writers_have_the_rows_that_spark_read() -> None:
    pytest.importorskip("deltalake")
    pytest.importorskip("pyiceberg")
    done = subprocess.run([sys.executable, str(CHECK), sys.executable], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2_000:]
