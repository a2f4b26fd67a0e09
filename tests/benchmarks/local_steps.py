"""Local SGD and DiLoCo: loss against traffic, with synchronization every step and every 8, 64 and 500 steps.

2 workers train flights. Local SGD averages the weights after a period. DiLoCo applies an outer optimizer, and
sends 16-bit values. A period ends with its epoch, which has more than 500 steps. Bytes are per step, over
both workers. The loss is the validation loss after the last epoch, as a mean over `--repeats` seeds.

    OMP_NUM_THREADS=1 make bench ARGS="local_steps --chart docs/local_steps.png"
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import compression
import harness
import precision
from short_sync import sync_of
from small_training import train_gang

import recipes
from ringspark.estimators.options.sync import AllReduce
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.jobs import cli

PERIODS = (8, 64, 500)
COLORS = {"local SGD": "tab:blue", "DiLoCo": "tab:orange"}


def settings_of(name: str, steps: int) -> Any:
    """Returns `localSteps` with all its keys."""
    given: Mapping[str, Any] = {"steps": steps}
    if name == "DiLoCo":
        given = {"name": "diloco", "steps": steps, "send": "fp16"}
    return sync_of(local=given)


def main() -> None:
    """Trains with each period, prints the table and draws the chart."""
    options = harness.parse(__doc__, repeats=(3, 1), epochs=(3, 1), batch_size=(256, 64), periods=(3, 1))
    root = harness.flights_root(options)
    with cli.spark("ringspark local steps", harness.MASTER):
        job = precision.flights_job(
            root, precision.feature_sizes(root), replace(recipes.NETWORK, epochs=options.epochs), 1
        )
    cases: dict[str, Any] = {"every step": AllReduce()} | {
        f"{name}, {steps}": settings_of(name, steps)
        for name in COLORS
        for steps in PERIODS[: options.periods]
    }
    losses: dict[str, list[float]] = {name: [] for name in cases}
    scores: dict[str, list[float]] = {name: [] for name in cases}
    sent: dict[str, list[float]] = {name: [] for name in cases}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.repeats):
            for number, (name, local_steps) in enumerate(cases.items()):
                config: TrainConfig = replace(
                    job.config,
                    run_uri=str(Path(folder) / f"{seed}-{number}"),
                    seed=seed,
                    batch_size=options.batch_size,
                    num_workers=compression.NUM_WORKERS,
                    collective="torch",
                    sync=local_steps,
                )
                result = train_gang(config, UserObjects(optimizer=compression.momentum(0.05, 1e-4)))
                logits, labels = precision.predict(job, result)
                found = {metric: score(logits, labels) for metric, score in job.metrics.items()}
                losses[name].append(found["log loss"])
                scores[name].append(found["ROC AUC"])
                costs = [record.cost for record in result.history if record.cost is not None]
                sent[name].append(sum(cost.bytes_sent or 0 for cost in costs) / result.steps)
                print(f"seed {seed}, {name}: {found}, {sent[name][-1]:,.0f} bytes a step", flush=True)
    base = mean(losses["every step"]), mean(sent["every step"])
    lines = [
        [
            name,
            f"{mean(losses[name]):.4f} ({mean(losses[name]) / base[0] - 1:+.2%})",
            f"{mean(scores[name]):.4f}",
            f"{mean(sent[name]):,.0f}",
            f"{base[1] / mean(sent[name]):.1f}x",
        ]
        for name in cases
    ]
    harness.print_table(
        f"local_steps: flights, {compression.NUM_WORKERS} workers, {options.epochs} epochs of batches of "
        f"{options.batch_size}, means over {options.repeats} seeds",
        ["", "log loss", "ROC AUC", "bytes per step", "bytes, 1 /"],
        lines,
    )
    if options.chart:
        draw(options.chart, losses, sent)


def draw(path: str, losses: Mapping[str, list[float]], sent: Mapping[str, list[float]]) -> None:
    """Draws loss over bytes: a line per method, and a point for synchronization in every step."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    axes.plot(mean(sent["every step"]), mean(losses["every step"]), "o", color="0.35", label="every step")
    for kind, color in COLORS.items():
        names = [name for name in losses if name.startswith(kind)]
        points = [(mean(sent[name]), mean(losses[name])) for name in names]
        axes.plot(*zip(*points, strict=True), "o-", color=color, label=kind)
        for name, point in zip(names, points, strict=True):
            axes.annotate(name.split(", ")[1], point, xytext=(4, 6), textcoords="offset points")
    axes.set(xscale="log", xlabel="bytes sent per step, both workers", ylabel="validation log loss")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
    print(f"chart: {path}")


if __name__ == "__main__":
    main()
