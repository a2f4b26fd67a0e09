"""A common failure of first runs: Spark's workers use another Python than the driver."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from programs import run_program

from ringspark.pipelines.spark_errors import advise_on_loss, explain_worker_errors

SCRIPT = """
from pyspark.sql import SparkSession
from ringspark.pipelines import write_shards
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
try:
    write_shards(spark.range(3), "shards")
except RuntimeError as error:
    print("REFUSED", error)
"""


def _write_with_another_python(folder: Path, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs SCRIPT where `python3` is a Python without packages."""
    other = folder / "bin" / "python3"
    other.parent.mkdir()
    # -S starts this Python without its site-packages.
    other.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    other.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name != "PYSPARK_PYTHON"}
    path = f"{other.parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=folder,
        env=kept | {"PATH": path} | variables,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.spark
def test_workers_without_the_package_are_explained(tmp_path: Path) -> None:
    done = _write_with_another_python(tmp_path, {"PYSPARK_PYTHON": str(tmp_path / "bin" / "python3")})
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("REFUSED"))
    assert "Spark's Python workers cannot import" in line
    assert "set PYSPARK_PYTHON to that Python" in line
    assert not list(tmp_path.glob("shards/*"))


@pytest.mark.spark
def test_workers_on_a_local_master_run_by_the_drivers_python(tmp_path: Path) -> None:
    done = _write_with_another_python(tmp_path, {})
    assert "REFUSED" not in done.stdout
    assert done.stderr.count(f"Spark's Python workers now run with {sys.executable}") == 1
    assert list(tmp_path.glob("shards/*"))


KILLED = """
import os, signal
from pyspark.sql import SparkSession
from pyspark.sql.functions import udf
from ringspark.pipelines import write_shards
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
die = udf(lambda number: os.kill(os.getpid(), signal.SIGKILL), "long")
try:
    write_shards(spark.range(3).select(die("id")), "shards")
except RuntimeError as error:
    print("REFUSED", error)
"""


@pytest.mark.spark
def test_workers_that_were_killed_are_explained_in_one_line(tmp_path: Path) -> None:
    done = run_program(KILLED, folder=tmp_path)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("REFUSED"))
    assert "Spark lost the workers of a task in every attempt (Python worker exited unexpectedly" in line
    assert not list(tmp_path.glob("shards/*"))


@pytest.mark.parametrize(
    ("reason", "advised"),
    [
        ("ExecutorLostFailure: Container is running 45.9MB beyond the 'PHYSICAL' memory limit", True),
        ("ExecutorLostFailure: Command exited with code 137", True),
        ("ExecutorLostFailure (executor 137 exited unrelated to the running tasks)", False),
        ("ExecutorLostFailure: Executor heartbeat timed out after 120000 ms", False),
    ],
)
def test_only_a_loss_for_memory_advises_more_memory(reason: str, advised: bool) -> None:
    assert ("raise spark.executor.memoryOverhead" in advise_on_loss(reason)) is advised


def test_other_errors_pass_unchanged() -> None:
    with pytest.raises(KeyError, match="other"), explain_worker_errors():
        raise KeyError("other")
