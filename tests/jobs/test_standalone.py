"""The three jobs on a real cluster: a standalone master, two workers, spark-submit with the .zip."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pyspark
import pytest

from ringspark.jobs import flights

ROOT = Path(__file__).parent.parent.parent
SPARK = Path(pyspark.__file__).parent / "bin"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(log: Path, pattern: str, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not (log.exists() and re.search(pattern, log.read_text())):
        assert time.monotonic() < deadline, f"{pattern!r} never came in {log}: {log.read_text()[-2000:]}"
        time.sleep(0.2)


@pytest.fixture
def environment() -> dict[str, str]:
    values = {k: v for k, v in os.environ.items() if k != "PYSPARK_GATEWAY_PORT"}
    return values | {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}


@pytest.fixture
def master(tmp_path: Path, environment: dict[str, str]) -> Iterator[str]:
    """Starts a master and two workers with one core each; stops them by process id."""
    port = _free_port()
    url = f"spark://127.0.0.1:{port}"
    deploy = [str(SPARK / "spark-class"), "org.apache.spark.deploy"]
    local = ["--host", "127.0.0.1", "--webui-port", "0"]
    commands = {"master": [deploy[0], f"{deploy[1]}.master.Master", "--port", str(port), *local]}
    for name in ("worker0", "worker1"):
        size = ["-c", "1", "-m", "1500m", "-d", str(tmp_path / name)]
        commands[name] = [deploy[0], f"{deploy[1]}.worker.Worker", url, *size, *local]
    processes = []
    try:
        for name, command in commands.items():
            log = tmp_path / f"{name}.log"
            with log.open("w") as file:
                processes.append(
                    subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
                )
            _wait_for(log, "New state: ALIVE" if name == "master" else "Successfully registered with master")
        yield url
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(timeout=300)


def _thinned(folder: Path) -> Path:
    """The tables with every twentieth flight."""
    table = flights.unpack_raw_tables(folder) / "flights.csv"
    header, *lines = table.read_text().splitlines(keepends=True)
    table.write_text(header + "".join(lines[::20]))
    return folder


@pytest.mark.spark
@pytest.mark.slow
def test_the_three_jobs_by_spark_submit(master: str, environment: dict[str, str], tmp_path: Path) -> None:
    dist = tmp_path / "dist"
    subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "build_package.py"), "--output", str(dist)], check=True
    )
    (package,) = dist.glob("*.zip")
    root = tmp_path / "flights"

    def submit(job: str, *options: str) -> str:
        command = [str(SPARK / "spark-submit"), "--master", master, "--py-files", str(package)]
        command += ["--conf", "spark.executor.memory=1g", "--conf", "spark.ui.enabled=false"]
        command += ["--conf", "spark.sql.shuffle.partitions=2"]  # 200 tasks take minutes
        command += [str(ROOT / "jobs" / f"{job}.py"), *options]
        # A user does not run inside a checkout.
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{job}: {done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return done.stdout

    assert "rows/s" in submit("etl", "--output", str(root), "--raw", str(_thinned(tmp_path / "raw")))
    trained = submit("train", "--data", str(root), "--epochs", "2")
    assert "epoch 2: loss 0." in trained
    assert [entry["epoch"] for entry in json.loads((root / "history.json").read_text())] == [1, 2]
    scored = submit("score", "--data", str(root))
    for word in ("ROC AUC", "average precision", "log loss", "gradient boosting", "rows/s"):
        assert word in scored
    assert (root / "report.png").read_bytes().startswith(b"\x89PNG")
    written = pq.read_table(root / "predictions")
    assert written.num_rows == pq.read_table(root / "test").num_rows > 1000
    assert set(written.column("prediction").to_pylist()) <= {0.0, 1.0}
