"""`ringspark check` as a process: what it says of ready and of broken sessions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from standalone import SPARK, spark_environment, standalone_cluster

COMMAND = Path(__file__).parent.parent.parent / "jobs" / "command.py"


def check(*options: str, **variables: str) -> tuple[int, dict[str, str], str]:
    """Runs the command; returns its exit code, subject -> line, and its last line."""
    done = subprocess.run(
        [sys.executable, "-m", "ringspark.jobs.command", "check", *options],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    # Spark's log goes to stderr as well.
    end = done.stderr if done.returncode else done.stdout
    return done.returncode, lines_of(done.stdout), end.strip().rpartition("\n")[2]


def lines_of(text: str) -> dict[str, str]:
    lines = (
        line.split(maxsplit=2) for line in text.splitlines() if line[:8].strip() in ("ok", "-", "PROBLEM")
    )
    return {subject: f"{word} {rest}" for word, subject, rest in lines}


@pytest.mark.spark
@pytest.mark.parametrize(
    "variables",
    [{}, pytest.param({"SPARK_REMOTE": "local[2]"}, marks=pytest.mark.slow)],
    ids=["classic", "connect"],
)
def test_a_ready_session(variables: dict[str, str]) -> None:
    code, found, last = check(**variables)
    assert (code, last) == (0, "ready to train")
    assert not [line for line in found.values() if line.startswith("PROBLEM")]
    assert "2 workers trained a small network" in found["training"]
    assert ("Connect" in found["versions"]) == bool(variables)


@pytest.mark.spark
def test_problems_of_a_local_session() -> None:
    code, found, last = check("--workers", "3", "--storage-uri", "/proc/nothing")
    assert (code, last) == (2, "ringspark check: error: 2 problems, see above")
    assert "lower numWorkers or add executor cores" in found["slots"]
    assert "choose a folder that this process may write to" in found["storage"]
    assert "training" not in found


def test_java_is_missing(tmp_path: Path) -> None:
    code, found, _ = check(JAVA_HOME=str(tmp_path))
    assert code == 2
    assert "install Java 17 or 21" in found["Java"]


@pytest.mark.spark
@pytest.mark.slow
def test_problems_of_a_cluster(tmp_path: Path) -> None:
    older = tmp_path / "packages" / "safetensors-0.0.1.dist-info"
    older.mkdir(parents=True)
    (older / "METADATA").write_text("Metadata-Version: 2.1\nName: safetensors\nVersion: 0.0.1\n")

    def submit(master: str, conf: dict[str, str], *options: str) -> dict[str, str]:
        confs = [f"--conf={name}={value}" for name, value in {"spark.executor.memory": "1g", **conf}.items()]
        command = [str(SPARK / "spark-submit"), "--master", master, *confs, str(COMMAND), "check", *options]
        done = subprocess.run(
            command, env=spark_environment(), cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 2, done.stdout + done.stderr
        return lines_of(done.stdout)

    with standalone_cluster(tmp_path, {"PYTHONPATH": str(older.parent)}) as master:
        found = submit(master, {})
        assert "2 tasks ran on 1 host" in found["executors"]
        assert "has safetensors 0.0.1, the driver has" in found["packages"]
        assert "storageUri is not set" in found["storage"]
        dynamic = {"spark.dynamicAllocation.enabled": "true"}
        found = submit(master, dynamic, "--storage-uri", f"memory://{tmp_path.name}")
        assert "start the session with it set to false" in found["slots"]
        assert "executors cannot use memory://" in found["storage"]
