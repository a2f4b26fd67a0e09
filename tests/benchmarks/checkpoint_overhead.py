"""Checkpoint overhead: steps of the flights job around a checkpoint, compared with other steps.

One training with the job's network runs on one rank in this process. The machine's speed drifts by more
within minutes than a checkpoint costs. So stretches of `--stretch` steps with and without a checkpoint
alternate, and each one with a checkpoint is compared with its two neighbours. The training copies the state
in the middle of a stretch, and a thread writes it in the background. The first step of an epoch starts the
reader and does not count. `--root` is the folder of the shards of flights/etl.py, which runs once if they are
missing.

    python tests/benchmarks/checkpoint_overhead.py
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import harness
from precision import feature_sizes, flights_job

import recipes
from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.estimators.training.settings.config import UserObjects
from ringspark.jobs import cli


class Clock(Callback):
    """Seconds of each step except the first of an epoch; `stretch` is the number of compared steps."""

    def __init__(self, stretch: int) -> None:
        self._stretch = stretch
        self.seconds: dict[int, float] = {}
        self._last: tuple[int, float] | None = None

    def on_step_end(self, state: TrainingState) -> None:
        now = time.perf_counter()
        if self._last is not None and self._last[0] == state.epoch:
            self.seconds[state.step] = now - self._last[1]
        self._last = state.epoch, now

    def of_stretch(self, middle: int) -> float:
        """Returns the mean seconds of the steps around a step."""
        steps = range(middle - self._stretch // 2 + 1, middle + self._stretch // 2 + 1)
        values = [self.seconds[step] for step in steps if step in self.seconds]
        return sum(values) / len(values)


def main() -> None:
    """Trains once, and prints the time ratio of stretches with a checkpoint to stretches without."""
    args = harness.parse(__doc__, epochs=(30, 4), members=(3, 1), stretch=(100, 2))
    root, stretch = harness.flights_root(args), args.stretch
    with cli.spark("ringspark checkpoint overhead", harness.MASTER):
        sizes = feature_sizes(root)
    job = flights_job(root, sizes, replace(recipes.NETWORK, epochs=args.epochs), args.members)
    clock = Clock(stretch)
    with tempfile.TemporaryDirectory() as folder:
        by_steps = {"checkpoint_every_steps": 2 * stretch, "checkpoint_every_seconds": 0.0}
        config = replace(job.config, run_uri=folder, **by_steps)
        result = train_here(config, UserObjects(callbacks=(clock,)))
    assert result.checkpoint_errors == ()
    checkpoints = range(2 * stretch, result.steps - 2 * stretch + 1, 2 * stretch)
    ratios, alike = [], []
    for step in checkpoints:
        if step == 2 * stretch:  # warm up the machine, the caches and the reader
            continue
        before, after = clock.of_stretch(step - stretch), clock.of_stretch(step + stretch)
        ratios.append(2 * clock.of_stretch(step) / (before + after))
        alike.append(after / before)
    low, high = interval(ratios)
    harness.print_table(
        f"checkpoint_overhead: flights, {args.members} members, {result.steps:,} steps, "
        f"{len(ratios)} checkpoints, {1000 * median(clock.seconds.values()):.0f} ms per step",
        [f"seconds of {stretch} steps, ratio", "median", "95 % interval", "lowest", "highest"],
        [
            [
                "with a checkpoint / before and after it",
                f"{median(ratios):.3f}",
                f"{low:.3f} to {high:.3f}",
                f"{min(ratios):.3f}",
                f"{max(ratios):.3f}",
            ],
            [
                "after / before, both without one",
                f"{median(alike):.3f}",
                "{:.3f} to {:.3f}".format(*interval(alike)),
                f"{min(alike):.3f}",
                f"{max(alike):.3f}",
            ],
        ],
    )


def interval(values: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """Returns the 95% bootstrap confidence interval of the median."""
    draw = random.Random(0)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


if __name__ == "__main__":
    main()
