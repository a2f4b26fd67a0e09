"""The jobs' options: help without Spark, and one sentence for what is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
JOBS = ["etl", "train", "score", "demo"]


def _run(job: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "jobs" / f"{job}.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("job", JOBS)
def test_help_names_every_option_with_its_default(job: str) -> None:
    done = _run(job, "--help")
    assert done.returncode == 0, done.stderr
    assert f"usage: {job}" in done.stdout
    assert "default:" in done.stdout


@pytest.mark.parametrize(
    ("job", "options", "message"),
    [
        ("etl", ["--fraction", "2"], "argument --fraction: must be above 0 and at most 1, got '2'"),
        (
            "train",
            ["--num-workers", "0"],
            "argument --num-workers: must be a whole number from 1 on, got '0'",
        ),
        ("train", ["--precision", "fp8"], "argument --precision: invalid choice: 'fp8'"),
        ("score", ["--sed", "1"], "unrecognized arguments: --sed 1"),
        ("demo", ["--epochs", "x"], "argument --epochs: must be a whole number from 1 on, got 'x'"),
    ],
)
def test_a_bad_option_is_one_line(job: str, options: list[str], message: str) -> None:
    done = _run(job, *options)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"{job}: error: ")


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ("train", "holds no shards"),
        ("score", "no model at"),
    ],
)
def test_a_folder_without_data_is_one_line(job: str, message: str, tmp_path: Path) -> None:
    done = _run(job, "--data", str(tmp_path))
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
