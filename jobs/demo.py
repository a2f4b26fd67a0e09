"""The whole main job: runs etl, train and score in a row, each in its own process.

python jobs/demo.py --root artifacts/flights
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from ringspark.jobs import cli

HERE = Path(__file__).resolve().parent


def build_parser() -> cli.JobParser:
    """The job's options."""
    parser = cli.JobParser("demo", "Will a flight arrive over 15 minutes late? ETL, training and scoring.")
    parser.add_argument("--root", default=cli.DEFAULT_ROOT, metavar="URI", help="folder for everything")
    parser.add_argument("--num-workers", type=cli.positive_int, default=2, help="workers that train together")
    parser.add_argument("--epochs", type=cli.positive_int, help="without it the default of train")
    parser.add_argument("--seed", type=int, default=0, help="of the training")
    parser.add_master()
    return parser


def run(args: argparse.Namespace) -> None:
    """Runs the three jobs; the first that fails ends the demo with its exit code."""
    started = time.perf_counter()
    master = ["--master", args.master] if args.master else []
    epochs = ["--epochs", str(args.epochs)] if args.epochs else []
    workers = ["--num-workers", str(args.num_workers), "--seed", str(args.seed)]
    for command in (
        ["etl.py", "--output", args.root],
        ["train.py", "--data", args.root, *workers, *epochs],
        ["score.py", "--data", args.root],
    ):
        done = subprocess.run([sys.executable, str(HERE / command[0]), *command[1:], *master], check=False)
        if done.returncode:
            raise SystemExit(done.returncode)
    print(f"demo: done in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    sys.exit(cli.main(build_parser(), run))
