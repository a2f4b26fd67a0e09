"""The command `ringspark pack`: an archive of this environment for Spark's executors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

DESCRIPTION = "Pack this Python environment for Spark's executors, and test the archive."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "The archive contains the Python interpreter, so executors need no Python. They need Linux, this "
        "machine's CPU architecture, libstdc++, tar, gzip, and the glibc that the command prints. pip, "
        "pyspark and py4j are left out, because executors use the pyspark of their Spark."
    )
    parser.add_argument(
        "--output", type=Path, default=Path("environment.tar.gz"), metavar="FILE", help="archive to write"
    )
    parser.add_argument(
        "--requirement",
        type=Path,
        metavar="FILE",
        help="pack only the packages in this file, ringspark, Horovod and Petastorm (if installed), and "
        "their dependencies; default: all packages",
    )
    parser.add_argument(
        "--exclude", nargs="+", action="extend", default=[], metavar="NAME", help="packages to leave out"
    )


def run(args: argparse.Namespace) -> None:
    from ringspark.extras.packing import pack

    pack(args.output, args.requirement, args.exclude)
