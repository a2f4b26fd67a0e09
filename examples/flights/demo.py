"""Runs etl, train and score in one Spark session.

python examples/flights/demo.py --root artifacts/flights
"""

from __future__ import annotations

import argparse
import sys
import time

import etl
import recipes
import score
import train
from ringspark.jobs import cli


def build_parser() -> cli.JobParser:
    parser = cli.JobParser("demo", "Will a flight arrive over 15 minutes late? ETL, training and scoring.")
    parser.add_argument("--root", default=recipes.DEFAULT_ROOT, metavar="URI", help="folder for everything")
    train.add_settings(parser, train.FOR_DEMO)
    cli.add_master(parser)
    return parser


def run(args: argparse.Namespace) -> None:
    started = time.perf_counter()
    given = [text for name in train.FOR_DEMO for text in (train.option_name(name), str(getattr(args, name)))]
    # One session: starting Spark and compiling its code again would take as long as a job.
    with cli.spark("ringspark demo", args.master, is_short=True):
        etl.run(etl.build_parser().parse_args(["--output", args.root]))
        train.run(train.build_parser().parse_args(["--data", args.root, *given]))
        score.run(score.build_parser().parse_args(["--data", args.root]))
    print(f"demo: done in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    sys.exit(cli.main(build_parser(), run))
