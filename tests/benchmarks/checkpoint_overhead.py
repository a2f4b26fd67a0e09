"""What checkpoints cost: the flights job's network with one of the whole training every 100 steps, and none.

Both train in turns, on one rank in this process, from the same shards and first weights. `--root` holds the
shards of jobs/etl.py, which runs once where they are missing; they are only read.

    python tests/benchmarks/checkpoint_overhead.py
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import harness
from precision import JOBS, flights_job

from ringspark.estimators.launch.local import train_here
from ringspark.jobs import cli

NONE = "none"


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    harness.add_options(parser)
    parser.add_argument("--epochs", type=cli.positive_int, default=1, help="of each training")
    parser.add_argument("--members", type=cli.positive_int, default=3, help="of the job's ensemble")
    parser.add_argument(
        "--every",
        type=cli.positive_int,
        nargs="+",
        default=[100],
        metavar="STEPS",
        help="between checkpoints",
    )
    parser.set_defaults(repeats=5, root=cli.DEFAULT_ROOT)
    return parser.parse_args()


def main() -> None:
    """Trains in turns and prints the seconds of a training, and their ratio to those without."""
    args = parse()
    root = Path(args.root).resolve()
    if not (root / "shards").exists():
        subprocess.run([sys.executable, str(JOBS / "etl.py"), "--output", str(root)], check=True)
    with cli.spark("ringspark checkpoint overhead", harness.MASTER) as spark:
        del spark
        job = flights_job(str(root / "shards"), str(root / "features"), args.epochs, args.members)
    steps: set[int] = set()

    def seconds(every: int | None) -> float:
        with tempfile.TemporaryDirectory() as folder:
            config = replace(job.config, run_uri=folder, checkpoint_every_steps=every)
            result = train_here(config)
        assert result.checkpoint_errors == ()
        steps.add(result.steps)
        return result.seconds

    cases: dict[str, Callable[[], float]] = {NONE: partial(seconds, None)}
    cases |= {f"every {every} steps": partial(seconds, every) for every in args.every}
    results = harness.measure_in_turns(cases, args.repeats)
    harness.print_table(
        f"checkpoint_overhead: flights, {args.members} members, {steps.pop():,} steps, "
        f"{args.repeats} rounds in turns",
        ["checkpoints", "seconds", "lowest", "highest", "ratio to none"],
        [
            [
                name,
                *(f"{value:.2f}" for value in (median(values), min(values), max(values))),
                f"{harness.median_ratio(values, results['none']):.3f}",
            ]
            for name, values in results.items()
        ],
    )


if __name__ == "__main__":
    main()
