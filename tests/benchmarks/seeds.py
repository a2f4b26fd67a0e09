"""The flights demo over `--repeats` seeds: the network against gradient boosting, with mean and deviation.

Each seed trains by flights/train.yaml. flights/score.py evaluates it on the test months, which chose neither
recipe. The benchmark reads the table that score prints. `--root` is the folder of the
results of examples/flights/etl.py, which runs once if they are missing. Models and reports go to a temporary
folder that links to its data, so the folder is not changed otherwise.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from statistics import mean, stdev

import harness

import demo

ETL_RESULTS = ("train", "test")
METRICS = ("ROC AUC", "average precision", "log loss")
ROW = re.compile(r"^(\S.*?) {2,}([\d.]+) {2,}([\d.]+) {2,}([\d.]+)$", re.MULTILINE)

Scores = dict[str, tuple[float, ...]]


def run_job(*command: str) -> str:
    """Runs one job in a new process. Returns its standard output.

    Raises:
        SystemExit: The job failed; with its messages.
    """
    done = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with code {done.returncode}\n{done.stdout}")
    return done.stdout


def read_scores(text: str) -> Scores:
    """Returns model -> metrics from the output of examples/flights/score.py.

    Raises:
        SystemExit: There is no such table in it.
    """
    scores: Scores = {name: tuple(map(float, values)) for name, *values in ROW.findall(text)}
    if not scores:
        raise SystemExit(f"examples/flights/score.py printed no table with {', '.join(METRICS)}:\n{text}")
    return scores


def score_seed(root: Path, seed: int, options: Namespace) -> Scores:
    """Trains and scores once."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ETL_RESULTS:
            (Path(folder) / name).symlink_to(root / name)
        changes = {key: f"{folder}/{name}" for key, name in demo.FOLDERS.items()}
        changes |= {"params.seed": str(seed), "params.epochs": str(options.epochs)}
        given = [f"--set={key}={value}" for key, value in changes.items()]
        run_job("-m", "ringspark.jobs.command", "train", str(demo.JOB), *given)
        score = str(harness.FLIGHTS / "score.py")
        return read_scores(run_job(score, "--data", folder, "--seed", str(seed)))


def main() -> None:
    """Runs the seeds one after another, then prints their mean and deviation."""
    options = harness.parse(__doc__, repeats=(5, 1), epochs=(2, 1))
    root = harness.flights_root(options)
    scores = []
    for seed in range(options.repeats):
        scores.append(score_seed(root, seed, options))
        print(f"seed {seed}: {scores[-1]}", flush=True)
    lines = []
    for model in scores[0]:
        metrics = list(zip(*(score[model] for score in scores), strict=True))
        deviations = [f" ({stdev(metric):.4f})" if len(metric) > 1 else "" for metric in metrics]
        cells = (f"{mean(metric):.4f}{more}" for metric, more in zip(metrics, deviations, strict=True))
        lines.append([model, *cells])
    harness.print_table("seeds: test months of the flights, mean (deviation)", ["", *METRICS], lines)


if __name__ == "__main__":
    main()
