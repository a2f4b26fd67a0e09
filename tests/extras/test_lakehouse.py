"""Tables that the Delta and Iceberg connectors of Spark wrote have the rows that the connectors read."""

import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ringspark.extras.external_tables.delta_log import copy_log

deltalake = pytest.importorskip("deltalake")

CHECK = Path(__file__).parents[3] / "shared" / "lakehouse" / "check.py"

pytestmark = pytest.mark.skipif(not CHECK.exists(), reason="the tables are not next to the repository")


@pytest.mark.spark
@pytest.mark.slow
def test_tables_of_sparks_own_writers_have_the_rows_that_spark_read() -> None:
    pytest.importorskip("pyiceberg")
    done = subprocess.run([sys.executable, str(CHECK), sys.executable], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2_000:]


def test_a_copied_log_lists_the_same_files(tmp_path: Path) -> None:
    with tarfile.open(CHECK.with_name("delta.tar.gz")) as tar:
        tar.extractall(tmp_path, filter="data")
    found = []
    for log in tmp_path.rglob("_delta_log"):
        if log.parent.name == "features":  # deltalake does not read it
            continue
        table = deltalake.DeltaTable(str(log.parent))
        with copy_log(str(log.parent)) as folder:
            assert _files(deltalake.DeltaTable(folder)) == _files(table)
        found.append(log.parent.name)
    assert "ckpt_v2_json" in found


def _files(table: Any) -> list[list[Any]]:
    paths = pa.table(table.get_add_actions(flatten=True)).column("path")
    vectors = pa.table(table.deletion_vectors()).column("selection_vector")
    return [sorted(column.to_pylist()) for column in (paths, vectors)]
