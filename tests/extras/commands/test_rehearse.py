"""`ringspark rehearse`: a job on a small cluster that is broken while it trains."""

from pathlib import Path

import numpy as np
import pytest
from command_line import run_ringspark

_JOB = """\
stage: TorchRegressor
data: {csv: ROWS, options: {header: true, inferSchema: true}}
save: {model: MODEL}
features: {x: "array(a, b)"}
params:
  featuresCol: x
  labelCol: y
  model: {target: mlp, kwargs: {in_features: 2, hidden: [8], out_features: 1}}
  numWorkers: 2
  epochs: EPOCHS
  batchSize: 10
  collective: torch
  checkpointEverySeconds: 1
"""


def _job(folder: Path, epochs: int) -> str:
    numbers = np.random.default_rng(0).normal(size=(400, 2))
    lines = [f"{a},{b},{a + b}" for a, b in numbers]
    (folder / "rows.csv").write_text("\n".join(["a,b,y", *lines]))
    text = _JOB.replace("ROWS", str(folder / "rows.csv")).replace("MODEL", str(folder / "model"))
    (folder / "job.yaml").write_text(text.replace("EPOCHS", str(epochs)))
    return str(folder / "job.yaml")


@pytest.mark.slow
def test_a_job_survives_a_lost_executor_and_a_killed_driver(tmp_path: Path) -> None:
    done = run_ringspark("rehearse", _job(tmp_path, 300), "--faults", "executor,driver")
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split() for line in done.stdout.rstrip().splitlines()[-3:]]
    # "yes", seconds, more seconds, resumes, losses to the cluster
    calm, executor, driver = (row[row.index("yes") :] for row in rows)
    assert calm[-2:] == ["0", "0"]
    assert int(executor[-2]) >= 1
    assert int(executor[-1]) == 1
    assert int(driver[-2]) >= 1
    # The job's own folders stay untouched.
    assert not (tmp_path / "model").exists()


def test_an_unknown_fault_is_refused(tmp_path: Path) -> None:
    done = run_ringspark("rehearse", _job(tmp_path, 1), "--faults", "flood")
    assert done.returncode == 2
    assert "--faults has no 'flood'; choose some of executor, late, slow, disk, driver" in done.stderr
