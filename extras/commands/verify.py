"""The command `ringspark verify`."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import Any

DESCRIPTION = "Check the certificate of a run, and train random intervals of it again."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_uri", metavar="URI", help="local run folder")
    parser.add_argument("--intervals", type=int, default=20, metavar="N", help="intervals to replay")
    parser.add_argument(
        "--workers", type=int, metavar="N", help="ranks of a replay; default: as many as the training"
    )
    parser.add_argument("--key", metavar="FILE", help="public EC key as a PEM file, to check the signature")
    parser.add_argument("--model", metavar="PATH", help="package.module:name of the network or estimator")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the draw, for tests; default: none")


def run(args: argparse.Namespace) -> None:
    from ringspark.extras.certificate.verification import verify_run

    model = None if args.model is None else _import_model(args.model)
    found = verify_run(
        args.run_uri, model, args.intervals, workers=args.workers, key=args.key, seed=args.seed
    )
    print(found.table())
    if not found.holds:
        sys.exit(1)


def _import_model(path: str) -> Any:
    """Imports "package.module:name". Raises ValueError if there is no such name."""
    module, colon, name = path.partition(":")
    if not colon or not module or not name:
        raise ValueError(f"--model must be package.module:name, got {path!r}; name an object of a module")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"--model {path!r} cannot be imported: {error}; put its folder on PYTHONPATH"
        ) from error
