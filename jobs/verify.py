"""Checks the certificate of a run, and trains random intervals of it again.

ringspark verify /data/runs/one --intervals 20 --key public.pem
"""

from __future__ import annotations

import argparse

from ringspark.jobs import cli

DESCRIPTION = "Check the certificate of a run, and train random intervals of it again."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_uri", metavar="URI", help="local run folder")
    parser.add_argument(
        "--intervals", type=cli.positive_int, default=20, metavar="N", help="intervals to replay"
    )
    parser.add_argument(
        "--workers", type=cli.positive_int, metavar="N", help="default: as many as the training"
    )
    parser.add_argument("--key", metavar="FILE", help="public EC key as a PEM file, to check the signature")
    parser.add_argument("--model", metavar="PATH", help="package.module:name of the network or estimator")
    parser.add_argument(
        "--seed", type=int, metavar="N", help="draw by a seed instead of the system's randomness"
    )


def run(args: argparse.Namespace) -> None:
    from ringspark.estimators.lazy_imports import load_object

    model = args.model and load_object("ringspark.extras.certificate.objects:import_model")(args.model)
    given = {"workers": args.workers, "key": args.key, "seed": args.seed}
    verify_run = load_object("ringspark.extras.certificate:verify_run")
    found = verify_run(args.run_uri, model, args.intervals, **given)
    print(found.table())
    if not found.holds:
        raise SystemExit(1)
