"""Compares ringspark with other libraries on the same rows, network and epochs, in one run.

    make bench-peers
    make bench-peers ARGS="--tiny"
    make bench-peers ARGS="--only horovod.spark,TorchDistributor --repeats 1 --keep"

Every contestant runs in a separate process and environment and starts a new session, in `--repeats`
interleaved rounds. If a contestant fails or exceeds `--limit` seconds, its row has the reason, and the run
continues. `--only` selects contestants whose job and name contain one of the words. `--keep` adds to the
results of earlier runs; the shared table then contains different states of the machine.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import contest
import flights_table
import harness
import mixed_table
import psutil
import tables

from ringspark.jobs import cli

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]


@dataclass(frozen=True)
class Contestant:
    """One contestant: its job, program in this folder, and environment."""

    job: str
    name: str
    program: str
    variant: str = ""
    environment: str = ".venv"

    @property
    def python(self) -> Path:
        """Path of its interpreter; this interpreter if it needs no other environment."""
        return Path(sys.executable) if self.environment == ".venv" else ROOT / self.environment / "bin/python"


# The first contestant of each job is the reference.
CONTESTANTS = (
    Contestant("network", "ringspark, torch and Arrow", "ours", "network:torch+arrow"),
    Contestant("network", "ringspark, Horovod and Petastorm", "ours", "network:horovod+petastorm"),
    Contestant(
        "network", "ringspark, Horovod's ring and Petastorm", "ours", "network:horovod+petastorm+network"
    ),
    Contestant(
        "network", "horovod.spark TorchEstimator", "horovod_estimator", environment=".venv-peers-horovod"
    ),
    Contestant("network", "TorchDistributor, DDP, pyarrow loader", "torch_distributor", "arrow"),
    Contestant("network", "TorchDistributor, DDP, Petastorm", "torch_distributor", "batched", ".venv-floor"),
    Contestant("reading", "ringspark, engine arrow", "ours", "reading:arrow", ".venv-floor"),
    Contestant("reading", "ringspark, engine petastorm", "ours", "reading:petastorm", ".venv-floor"),
    Contestant(
        "reading", "Petastorm BatchedDataLoader", "petastorm_loaders", "BatchedDataLoader", ".venv-floor"
    ),
    Contestant("reading", "Petastorm DataLoader", "petastorm_loaders", "DataLoader", ".venv-floor"),
    Contestant("flights", "ringspark, torch and Arrow", "ours", "flights:torch+arrow"),
    Contestant("flights", "ringspark, Horovod and Petastorm", "ours", "flights:horovod+petastorm"),
    Contestant(
        "flights",
        "xgboost.spark SparkXGBClassifier",
        "xgboost_stage",
        "flights",
        environment=".venv-peers-xgboost",
    ),
    Contestant("flights", "Spark MultilayerPerceptronClassifier", "spark_perceptron"),
    Contestant("flights", "scikit-learn boosting, one process", "scikit_learn", "boosting"),
    Contestant("flights", "scikit-learn MLPClassifier, one process", "scikit_learn", "perceptron"),
    Contestant("table", "ringspark, TorchClassifier", "ours", "table"),
    Contestant(
        "table",
        "xgboost.spark SparkXGBClassifier",
        "xgboost_stage",
        "table",
        environment=".venv-peers-xgboost",
    ),
)


def options() -> Any:
    """Parses the command line."""
    parser = harness.parser(__doc__, rows=(1_000_000, 20_000), repeats=(5, 1), limit=(300, 300))
    parser.add_argument(
        "--only", default="", metavar="WORDS", help="contestants with one of these words, a,b"
    )
    parser.add_argument("--keep", action="store_true", help="add to the results of earlier runs")
    parser.add_argument("--results", default="artifacts/peers", metavar="DIR", help="rows and results")
    return parser.parse_args()


def write_rows(args: Any, folder: Path, jobs: Set[str]) -> dict[str, str]:
    """Writes the rows of the jobs if they are missing. Returns their folders, by the entry's names."""
    folders = {
        "numbers": folder / f"numbers-{args.rows}",
        "flights": folder / ("flights-tiny" if args.tiny else "flights"),
        "table": folder / f"table-{args.rows}",
    }
    # The file of each folder that is written last.
    last = {"numbers": "_SUCCESS", "flights": "sizes.json", "table": "test.parquet/_SUCCESS"}
    needed = {"numbers" if job in ("network", "reading") else job for job in jobs}
    missing = {name for name in needed if not (folders[name] / last[name]).exists()}
    if missing:
        root = harness.flights_root(args) if "flights" in missing else None
        with cli.spark("rows for the peers", harness.MASTER) as spark:
            if "numbers" in missing:
                numbers = harness.random_frame(spark, args.rows)
                numbers.write.mode("overwrite").parquet(str(folders["numbers"]))
            if root is not None:
                flights_table.write(spark, root, folders["flights"])
            if "table" in missing:
                mixed_table.write(spark, args.rows, folders["table"])
    return {name: str(path) for name, path in folders.items()}


def take_turn(contestant: Contestant, folders: Mapping[str, str], args: Any) -> dict[str, Any]:
    """Runs one contestant. Returns its results, or the reason under "failed"."""
    if not contestant.python.exists():
        return {"failed": f"{contestant.environment} is missing; `make bench-peers` builds it"}
    with tempfile.TemporaryDirectory(prefix="peers-") as scratch:
        entry = contest.Entry(variant=contestant.variant, num_rows=args.rows, scratch=scratch, **folders)
        command = [str(contestant.python), str(HERE / f"{contestant.program}.py"), entry.to_json()]
        log_file = Path(args.results, re.sub(r"\W+", "-", f"{contestant.job} {contestant.name}") + ".log")
        with log_file.open("w+") as log:
            # This process had a session, which set the Python of Spark's workers to this interpreter.
            environment = os.environ | {"PYSPARK_PYTHON": str(contestant.python)}
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=scratch,
                env=environment,
            )
            try:
                status = process.wait(args.limit)
            except subprocess.TimeoutExpired:
                return {"failed": f"no result in {args.limit} s, see {log_file}"}
            finally:
                end(process)
            log.seek(0)
            lines = [line for line in log.read().splitlines() if line.strip()]
    if status == 0 and lines and lines[-1].startswith(contest.MARK):
        figures: dict[str, Any] = json.loads(lines[-1].removeprefix(contest.MARK))
        return figures
    # Frames of Java follow the error in Spark's tracebacks.
    errors = [line for line in lines if re.match(r"\S*(Error|Exception)\b", line)] or lines
    return {"failed": f"{errors[-1][:200] if errors else f'exit status {status}'}, see {log_file}"}


def end(process: subprocess.Popen[bytes]) -> None:
    """Kills the remaining processes of a contestant: program, JVM, Python workers and children."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return
    for member in family:
        member.kill()
    process.kill()
    process.wait()


def main() -> None:
    """Runs the rounds, then prints the tables."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # no contestant survives this process
    args = options()
    folder = Path(args.results).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    words = args.only.split(",")
    chosen = [one for one in CONTESTANTS if any(word in f"{one.job} {one.name}" for word in words)]
    if not chosen:
        raise SystemExit(f"no contestant has one of the words {args.only!r}")
    folders = write_rows(args, folder, {one.job for one in chosen})
    results = folder / ("results-tiny.jsonl" if args.tiny else "results.jsonl")
    if not args.keep:
        results.unlink(missing_ok=True)
    for number in range(args.repeats):
        for contestant in chosen:
            start = time.perf_counter()
            outcome = take_turn(contestant, folders, args)
            line = {"job": contestant.job, "name": contestant.name, "rows": args.rows, **outcome}
            with results.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"round {number + 1}, {time.perf_counter() - start:.0f} s: {line}", flush=True)
    found = [json.loads(line) for line in results.read_text().splitlines()]
    order = [(one.job, one.name) for one in CONTESTANTS]
    tables.print_all(tables.by_contestant(found, order))


if __name__ == "__main__":
    main()
