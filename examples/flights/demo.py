"""Runs etl, `ringspark train` and score in one Spark session.

python examples/flights/demo.py --root artifacts/flights
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import etl
import score
from ringspark.jobs import cli, command, train_job

JOB = Path(__file__).with_name("train.yaml")
# Keys of the job and their folders below `--root`.
FOLDERS = {"data.parquet": "train", "params.runUri": "runs/current", "save.model": "model"}


def build_parser() -> cli.JobParser:
    parser = cli.JobParser("demo", "Will a flight arrive over 15 minutes late? ETL, training and scoring.")
    parser.add_argument("--root", default=etl.DEFAULT_ROOT, metavar="URI", help="folder for everything")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a value of train.yaml, such as params.epochs=3; can be repeated",
    )
    cli.add_master(parser)
    return parser


def run(args: argparse.Namespace) -> None:
    started = time.perf_counter()
    changes = [*(f"{key}={args.root}/{folder}" for key, folder in FOLDERS.items()), *args.set]
    options = [f"--set={change}" for change in changes]
    train = command.build_parser().parse_args(["train", str(JOB), *options])
    train_job.make_estimator(*train_job.read_job(train.file, train.set))  # refuses wrong settings at once
    # One session: starting Spark and compiling its code again would take as long as a job.
    with cli.spark("ringspark demo", args.master, is_short=True):
        etl.run(etl.build_parser().parse_args(["--output", args.root]))
        train_job.run(train)
        score.run(score.build_parser().parse_args(["--data", args.root]))
    print(f"demo: done in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    sys.exit(cli.main(build_parser(), run))
