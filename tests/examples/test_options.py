"""Options of the flights scripts: help without Spark, and one clear error per mistake."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import demo
import etl
import score
import train
from ringspark.jobs import cli

ROOT = Path(__file__).parent.parent.parent
JOBS = {"etl": etl, "train": train, "score": score, "demo": demo}


def test_a_job_is_a_script() -> None:
    command = [sys.executable, str(ROOT / "examples" / "flights" / "train.py"), "--num-workers", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "train: error: argument --num-workers: must be at least 1, got 0; see --help\n"


@pytest.mark.parametrize("job", JOBS)
def test_help_names_every_option_with_its_default(job: str) -> None:
    text = JOBS[job].build_parser().format_help()
    assert text.startswith(f"usage: {job}")
    assert "default:" in text


@pytest.mark.spark
@pytest.mark.parametrize(("job", "message"), [(train, "no rows at"), (score, "no model at")])
def test_a_folder_without_data_is_one_line_that_says_where_spark_looked(job, message, mounts, capsys):
    for data in ("/data/flights", f"viewfs://{mounts.name}/data/flights"):
        assert cli.main(job.build_parser(), job.run, ["--data", data]) == 1
        told = capsys.readouterr().err
        assert told.startswith(job.build_parser().prog + ": error: ")
        assert message in told
        assert f"{mounts}/flights/" in told
        assert told.count("\n") == 1
