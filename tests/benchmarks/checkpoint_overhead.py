"""What checkpoints cost: the flights job's steps around a checkpoint against the steps between two.

One training on one rank in this process, with the job's network. A machine's speed drifts by more within
minutes than a checkpoint costs; so stretches of 100 steps with a checkpoint in their middle, which training
copies and a thread writes beside it, and stretches of 100 without one take turns, and each of the first is
compared with its two neighbours. The first step of an epoch, which starts the reader, counts in none.
`--root` holds the shards of jobs/etl.py, which runs once where they are missing; they are only read.

    python tests/benchmarks/checkpoint_overhead.py
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import harness
from precision import JOBS, flights_job

from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.estimators.training.settings.config import UserObjects
from ringspark.jobs import cli

STRETCH = 100
# Steps by which the machine, the caches and the reader have settled.
WARM_UP = 2 * STRETCH


class Clock(Callback):
    """Seconds of each step but the first of an epoch."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}
        self._last: tuple[int, float] | None = None

    def on_step_end(self, state: TrainingState) -> None:
        now = time.perf_counter()
        if self._last is not None and self._last[0] == state.epoch:
            self.seconds[state.step] = now - self._last[1]
        self._last = state.epoch, now

    def of_stretch(self, middle: int) -> float:
        """Mean seconds of the steps around one."""
        steps = range(middle - STRETCH // 2 + 1, middle + STRETCH // 2 + 1)
        values = [self.seconds[step] for step in steps if step in self.seconds]
        return sum(values) / len(values)


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    harness.add_options(parser)
    parser.add_argument("--epochs", type=cli.positive_int, default=30, help="of the training")
    parser.add_argument("--members", type=cli.positive_int, default=3, help="of the job's ensemble")
    parser.set_defaults(root=cli.DEFAULT_ROOT)
    return parser.parse_args()


def main() -> None:
    """Trains once, and prints the ratio of the stretches with a checkpoint to those without."""
    args = parse()
    root = Path(args.root).resolve()
    if not (root / "shards").exists():
        subprocess.run([sys.executable, str(JOBS / "etl.py"), "--output", str(root)], check=True)
    with cli.spark("ringspark checkpoint overhead", harness.MASTER) as spark:
        del spark
        job = flights_job(str(root / "shards"), str(root / "features"), args.epochs, args.members)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = replace(job.config, run_uri=folder, checkpoint_every_steps=2 * STRETCH)
        result = train_here(config, UserObjects(callbacks=(clock,)))
    assert result.checkpoint_errors == ()
    checkpoints = range(2 * STRETCH, result.steps - 2 * STRETCH + 1, 2 * STRETCH)
    ratios, alike = [], []
    for step in checkpoints:
        if step <= WARM_UP:
            continue
        before, after = clock.of_stretch(step - STRETCH), clock.of_stretch(step + STRETCH)
        ratios.append(2 * clock.of_stretch(step) / (before + after))
        alike.append(after / before)
    low, high = interval(ratios)
    harness.print_table(
        f"checkpoint_overhead: flights, {args.members} members, {result.steps:,} steps, "
        f"{len(ratios)} checkpoints, {1000 * median(clock.seconds.values()):.0f} ms a step",
        ["seconds of 100 steps, ratio", "median", "95 % interval", "lowest", "highest"],
        [
            [
                "with a checkpoint to the 100 before and after",
                f"{median(ratios):.3f}",
                f"{low:.3f} to {high:.3f}",
                f"{min(ratios):.3f}",
                f"{max(ratios):.3f}",
            ],
            [
                "those after to those before, both without",
                f"{median(alike):.3f}",
                "{:.3f} to {:.3f}".format(*interval(alike)),
                f"{min(alike):.3f}",
                f"{max(alike):.3f}",
            ],
        ],
    )


def interval(values: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """Where the median of as many values lies in 95 of 100 cases: the bootstrap's percentiles."""
    draw = random.Random(0)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


if __name__ == "__main__":
    main()
