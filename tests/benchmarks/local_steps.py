"""Local SGD and DiLoCo: loss against traffic, with synchronization every step and every 8, 64 and 500 steps.

2 workers train flights. Local SGD averages the weights after a period. DiLoCo applies an outer optimizer, and
sends 16-bit values. A period ends with its epoch, which has more than 500 steps. With one-shot averaging the
workers train apart, and their weights are averaged once at the end. Bytes are per step, over both workers.
The loss is the validation loss after the last epoch, as a mean over `--repeats` seeds.

    OMP_NUM_THREADS=1 make bench ARGS="local_steps"
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import compression
import harness

from ringspark.estimators import DiLoCo, LocalSGD
from ringspark.estimators.options.sync import AllReduce

PERIODS = (8, 64, 500)


def main() -> None:
    """Trains with each period and prints the table."""
    options = harness.parse(__doc__, repeats=(3, 1), epochs=(3, 1), batch_size=(256, 64), periods=(3, 1))
    periods = PERIODS[: options.periods]
    syncs: dict[str, Any] = {"every step": AllReduce()}
    syncs |= {f"local SGD, {steps}": LocalSGD(steps=steps) for steps in periods}
    syncs |= {f"DiLoCo, {steps}": DiLoCo(steps=steps, send="fp16") for steps in periods}
    syncs["one-shot averaging"] = LocalSGD(steps="training")
    config = replace(compression.flights_config(options), batch_size=options.batch_size)
    found = compression.train_cases(config, syncs, compression.momentum(0.05, 1e-4), options.repeats)
    base = found["every step"]
    harness.print_table(
        f"local_steps: flights, {harness.NUM_WORKERS} workers, {options.epochs} epochs of batches of "
        f"{options.batch_size}, means over {options.repeats} seeds",
        ["", "log loss", "ROC AUC", "bytes per step", "bytes, 1 /"],
        [
            [
                name,
                f"{own['log loss']:.4f} ({own['log loss'] / base['log loss'] - 1:+.2%})",
                f"{own['ROC AUC']:.4f}",
                f"{own['bytes']:,.0f}",
                f"{base['bytes'] / own['bytes']:.1f}",
            ]
            for name, own in found.items()
        ],
    )


if __name__ == "__main__":
    main()
