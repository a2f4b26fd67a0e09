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
from ringspark.jobs.train import FOR_DEMO

HERE = Path(__file__).resolve().parent


def build_parser() -> cli.JobParser:
    """Returns the parser of the job's options."""
    parser = cli.JobParser("demo", "Will a flight arrive over 15 minutes late? ETL, training and scoring.")
    parser.add_argument("--root", default=cli.DEFAULT_ROOT, metavar="URI", help="folder for everything")
    for setting, default in FOR_DEMO:
        cli.add_setting(parser, setting, default)
    parser.add_master()
    return parser


def run(args: argparse.Namespace) -> None:
    """Runs the three jobs; the first that fails ends the demo with its exit code."""
    started = time.perf_counter()
    master = ["--master", args.master] if args.master else []
    given = [text for s, _ in FOR_DEMO for text in (cli.option(s), str(getattr(args, s.name)))]
    for command in (
        ["etl.py", "--output", args.root],
        ["train.py", "--data", args.root, *given],
        ["score.py", "--data", args.root],
    ):
        done = subprocess.run([sys.executable, str(HERE / command[0]), *command[1:], *master], check=False)
        if done.returncode:
            raise SystemExit(done.returncode)
    print(f"demo: done in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    sys.exit(cli.main(build_parser(), run))
