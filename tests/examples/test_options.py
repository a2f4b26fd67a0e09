"""Options of the flights scripts: help without Spark, and one clear error per mistake."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import demo
import etl
import score
from ringspark.jobs import cli
from ringspark.jobs.train_job import read_job

ROOT = Path(__file__).parent.parent.parent
JOBS = {"etl": etl, "score": score, "demo": demo}


def test_a_job_is_a_script() -> None:
    command = [sys.executable, str(ROOT / "examples" / "flights" / "etl.py"), "--fraction", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    message = "argument --fraction: must be above 0 and at most 1, got '2'; see --help"
    assert done.stderr == f"etl: error: {message}\n"


@pytest.mark.parametrize("job", JOBS)
def test_help_names_every_option_with_its_default(job: str) -> None:
    text = JOBS[job].build_parser().format_help()
    assert text.startswith(f"usage: {job}")
    assert "default:" in text


@pytest.mark.spark
def test_a_folder_without_data_is_one_line_that_says_where_spark_looked(mounts, capsys):
    for data in ("/data/flights", f"viewfs://{mounts.name}/data/flights"):
        assert cli.main(score.build_parser(), score.run, ["--data", data]) == 1
        told = capsys.readouterr().err
        assert told.startswith("score: error: no model at")
        assert f"{mounts}/flights/" in told
        assert told.count("\n") == 1


@pytest.mark.spark
def test_the_job_trains_on_the_columns_that_the_etl_writes() -> None:
    import flights

    _, job = read_job(str(demo.JOB))
    assert job.params["inputCols"] == [*flights.CATEGORICAL, *flights.NUMERIC]


def test_the_table_of_metrics_has_a_line_for_each_model() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    labels, probabilities = np.array([0, 1, 0, 1, 1]), np.array([0.1, 0.7, 0.6, 0.4, 0.9])
    models = {"network": (labels, probabilities), "a decision tree": (labels, probabilities / 2)}
    lines = score.format_table(models).splitlines()
    assert len({len(line) for line in lines}) == 1
    measures = (metrics.roc_auc_score, metrics.average_precision_score, metrics.log_loss)
    assert lines[1].split() == ["network", *(f"{each(labels, probabilities):.4f}" for each in measures)]
    with pytest.raises(ValueError, match=r"network: the labels must hold both classes, 0 and 1, got \[0\]"):
        score.format_table({"network": (labels[:1], probabilities[:1])})
