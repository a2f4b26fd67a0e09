"""The command `ringspark certify`."""

from __future__ import annotations

import argparse

DESCRIPTION = "Sign the folder of a run that was trained with certify=True."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_uri", metavar="URI", help="run folder of a finished training")
    parser.add_argument("--key", metavar="FILE", required=True, help="private EC key as a PEM file")


def run(args: argparse.Namespace) -> None:
    from ringspark.extras.certificate.certificate import certify

    print(f"certify: {certify(args.run_uri, args.key)}")
