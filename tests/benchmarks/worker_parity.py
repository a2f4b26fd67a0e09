"""Reproducibility: distance of 2 workers from 1 on the same global batches after 50 steps, and of a rerun.

All use fp32. The steps see the same rows, so the weights differ only by the order of additions. In some
trainings a ReLU's input is so close to 0 that rounding decides its sign; from there the trainings part, so
the table has the median over seeds and the largest. A rerun repeats every addition, so its weights should be
bitwise equal.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

import harness
import torch
from small_training import train_gang, weights_of

from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.jobs import cli
from ringspark.pipelines import write_shards

STEPS_PER_EPOCH = 25
EPOCHS = 2
LEARNING_RATES = {"sgd": 0.05, "adamw": 1e-3}
GANGS = ("horovod", "torch")


def trained_weights(config: TrainConfig, run_uri: Path) -> torch.Tensor:
    """Trains, in new processes if there are several ranks. Returns all weights in one vector."""
    config = replace(config, run_uri=str(run_uri))
    result = train_here(config) if config.num_workers == 1 else train_gang(config)
    assert result.steps == EPOCHS * STEPS_PER_EPOCH
    return weights_of(result, harness.MLP.build())


def compare(config: TrainConfig, folder: Path, seeds: int) -> list[list[str]]:
    """Returns a line for each collective: 2 workers against 1 by several seeds, and a rerun."""
    lines = []
    for collective in GANGS:
        gang = replace(config, collective=collective, num_workers=harness.NUM_WORKERS)
        differences, is_equal = [], True
        for seed in range(seeds):
            one, two, again = (
                trained_weights(
                    replace(each, seed=seed), folder / f"{config.optimizer}-{collective}-{seed}-{run}"
                )
                for run, each in enumerate((config, gang, gang))
            )
            differences.append((two - one).abs().max().item())
            is_equal &= torch.equal(two, again)
        lines.append(
            [
                f"{gang.num_workers} x {collective}, {config.optimizer}",
                f"{median(differences):.1e}",
                f"{max(differences):.1e}",
                "yes" if is_equal else "no",
            ]
        )
    return lines


def main() -> None:
    """Trains each gang twice with one seed from the same shards."""
    options = harness.parse(__doc__, rows=(6_350, 1_000), optimizers=(2, 1), seeds=(5, 1))
    batch_size = math.ceil(options.rows / STEPS_PER_EPOCH)
    if math.ceil(options.rows / batch_size) != STEPS_PER_EPOCH or batch_size < harness.NUM_WORKERS:
        raise SystemExit(
            f"--rows must fill {STEPS_PER_EPOCH} batches, got {options.rows}; give 1,000 or more"
        )
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with cli.spark("ringspark bench parity", harness.MASTER) as spark:
            frame = harness.random_frame(spark, options.rows)
            manifest = write_shards(frame, str(folder / "shards"), row_group_rows=500)
        lines = []
        for optimizer, learning_rate in list(LEARNING_RATES.items())[: options.optimizers]:
            config = TrainConfig(
                shards_uri=manifest.uri,
                run_uri="",
                task="regression",
                model=harness.MLP.to_json(),
                losses=("mse",),
                input_columns=("features",),
                label_columns=("label",),
                optimizer=optimizer,
                learning_rate=learning_rate,
                epochs=EPOCHS,
                batch_size=batch_size,
                collective="local",
                reader="arrow",
            )
            lines += compare(config, folder, options.seeds)
    harness.print_table(
        f"worker_parity: weights after {EPOCHS * STEPS_PER_EPOCH} steps, fp32, MLP 32-128-128-1, "
        f"{options.rows:,} rows, global batch {batch_size}, {options.seeds} seeds",
        ["", "largest difference from 1 worker, median", "largest", "reruns bitwise equal"],
        lines,
    )


if __name__ == "__main__":
    main()
