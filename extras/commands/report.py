"""The command `ringspark report`."""

from __future__ import annotations

import argparse

DESCRIPTION = "Write the report of a training as one HTML page."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_uri", metavar="URI", help="run folder of a running, failed or finished training")
    parser.add_argument("path", metavar="FILE", help="HTML file to write, on any store")


def run(args: argparse.Namespace) -> None:
    from ringspark.extras.report import report

    report(args.run_uri, args.path)
    print(f"report: {args.path}")
