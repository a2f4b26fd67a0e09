"""The three jobs on a real cluster: a standalone master, two workers, spark-submit with the .zip."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from standalone import SPARK, spark_environment, standalone_cluster

import demo
import flights

ROOT = Path(__file__).parent.parent.parent


def _thinned(folder: Path) -> Path:
    """The tables with every twentieth flight."""
    table = flights.unpack_raw_tables(folder) / "flights.csv"
    header, *lines = table.read_text().splitlines(keepends=True)
    table.write_text(header + "".join(lines[::20]))
    return folder


@pytest.mark.spark
@pytest.mark.slow
def test_the_three_jobs_by_spark_submit(tmp_path: Path) -> None:
    with standalone_cluster(tmp_path) as master:
        _check_the_jobs(master, tmp_path)


def _check_the_jobs(master: str, tmp_path: Path) -> None:
    dist = tmp_path / "dist"
    subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "build_package.py"), "--output", str(dist)], check=True
    )
    (package,) = dist.glob("*.zip")
    root = tmp_path / "flights"

    def submit(job: Path, *options: str) -> str:
        command = [str(SPARK / "spark-submit"), "--master", master, "--py-files", str(package)]
        command += ["--conf", "spark.executor.memory=1g", "--conf", "spark.ui.enabled=false"]
        command += ["--conf", "spark.sql.shuffle.partitions=2"]  # 200 tasks take minutes
        command += [str(job), *options]
        # A user does not run inside a checkout.
        done = subprocess.run(
            command, env=spark_environment(), cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{job}: {done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return done.stdout

    etl, score = (demo.JOB.with_name(name) for name in ("etl.py", "score.py"))
    assert "rows/s" in submit(etl, "--output", str(root), "--raw", str(_thinned(tmp_path / "raw")))
    places = [f"--set={key}={root}/{name}" for key, name in demo.FOLDERS.items()]
    trained = submit(ROOT / "jobs" / "command.py", "train", str(demo.JOB), *places)
    assert "epoch 2: loss 0." in trained
    scored = submit(score, "--data", str(root))
    for word in ("ROC AUC", "average precision", "log loss", "gradient boosting", "rows/s"):
        assert word in scored
    written = pq.read_table(root / "predictions")
    assert written.num_rows == pq.read_table(root / "test").num_rows > 1000
    assert set(written.column("prediction").to_pylist()) <= {0.0, 1.0}
