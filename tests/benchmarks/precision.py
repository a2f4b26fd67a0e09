"""Mixed precision: bf16 and fp16 against fp32 on the flights job's network and on digits.

One rank in this process trains the three precisions in interleaved rounds, from the same shards and initial
weights. Metrics of the validation rows are measured after the last epoch in fp32, as `transform` computes.
There are no separate test rows, so the table shows the difference between precisions, not the quality of the
networks. `--root` is the folder of the shards of flights/etl.py, which runs once if they are missing. On CPUs
without 16-bit arithmetic (AVX2 only), a step of bf16 or fp16 takes many times as long as a step of fp32;
lower `--members` and `--epochs` there.

    python tests/benchmarks/precision.py --chart docs/precision.png
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import harness
import numpy as np
import torch

import recipes
from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.checkpoint.weights import load_checkpoint
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.estimators.training.worker import TrainResult
from ringspark.jobs import cli
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest, open_reader, write_shards

PRECISIONS = ("fp32", "bf16", "fp16")
COLORS = {"fp32": "0.35", "bf16": "tab:blue", "fp16": "tab:orange"}

Score = Callable[[np.ndarray, np.ndarray], float]  # logits (rows, width), labels (rows,) -> metric


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training, and its metrics on the validation rows."""

    title: str
    config: TrainConfig
    metrics: dict[str, Score]


def feature_sizes(root: Path) -> tuple[list[int], int]:
    """Returns indices of each categorical column, and numbers per row. Needs a running Spark session."""
    from pyspark.ml import PipelineModel

    import flights

    return flights.feature_sizes(PipelineModel.load(str(root / "features")))


def flights_job(root: Path, sizes: tuple[list[int], int], recipe: recipes.NetworkRecipe, members: int) -> Job:
    """Returns a training of embeddings and an MLP on the encoded flights with this recipe."""
    from sklearn.metrics import average_precision_score, roc_auc_score

    spec = recipe.spec(members, *sizes)
    config = TrainConfig(
        shards_uri=str(root / "shards"),
        run_uri="",
        task="classification",
        model=spec.to_json(),
        losses=("bce_with_logits_per_member",),
        input_columns=("categorical", "numeric"),
        label_columns=("label",),
        epochs=recipe.epochs,
        batch_size=1024,
        optimizer="adamw",
        lr_schedule="one_cycle",
        learning_rate=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        reader="arrow",
    )
    return Job(
        title="flights",
        config=config,
        metrics={
            "ROC AUC": lambda logits, labels: float(roc_auc_score(labels, logits)),
            "average precision": lambda logits, labels: float(average_precision_score(labels, logits)),
            "log loss": lambda logits, labels: float(
                np.logaddexp(0, -np.where(labels > 0, 1, -1) * logits[:, 0]).mean()
            ),
        },
    )


def digits_job(spark: Any, folder: str, epochs: int, hidden: Sequence[int] = (64, 64)) -> Job:
    """Returns the job of scikit-learn's digits, with 360 of 1,797 as validation rows."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    held_out = np.zeros(len(labels), dtype=bool)
    held_out[order[:360]] = True
    rows = [
        ([float(v) for v in row / 16], int(label), bool(held))
        for row, label, held in zip(pixels, labels, held_out, strict=True)
    ]
    frame = spark.createDataFrame(rows, "x array<float>, label int, is_validation boolean")
    write_shards(frame, folder, num_files=2, validation_col="is_validation")
    spec = ModelSpec("mlp", {"in_features": 64, "hidden": [*hidden], "out_features": 10, "dropout": 0.2})
    config = TrainConfig(
        shards_uri=folder,
        run_uri="",
        task="classification",
        model=spec.to_json(),
        losses=("cross_entropy",),
        input_columns=("x",),
        label_columns=("label",),
        epochs=epochs,
        batch_size=64,
        lr_schedule="one_cycle",
        learning_rate=3e-3,
        weight_decay=1e-2,
        reader="arrow",
    )
    return Job(
        title="digits",
        config=config,
        metrics={"accuracy": lambda logits, labels: float((logits.argmax(1) == labels).mean())},
    )


def predict(job: Job, result: TrainResult) -> tuple[np.ndarray, np.ndarray]:
    """Returns fp32 logits, (rows, width), and labels of the validation rows."""
    assert job.config.model is not None
    module = ModelSpec.from_json(job.config.model).build()
    load_checkpoint(result.checkpoint_uri, module)
    module.eval()
    manifest = ShardManifest.load(job.config.shards_uri).select("validation")
    names = [*job.config.input_columns, *job.config.label_columns]
    logits, labels = [], []
    with torch.no_grad():
        for batch in open_reader(manifest, columns=names, batch_size=8192, engine="arrow").batches(0):
            inputs = [torch.from_numpy(np.array(batch[name])) for name in job.config.input_columns]
            logits.append(module(*inputs).reshape(len(inputs[0]), -1).numpy())
            labels.append(batch[job.config.label_columns[0]])
    return np.concatenate(logits), np.concatenate(labels)


def train(job: Job, num_seeds: int, folder: str) -> dict[str, list[tuple[TrainResult, dict[str, float]]]]:
    """Returns precision -> the training and its metrics for each seed."""
    results: dict[str, list[tuple[TrainResult, dict[str, float]]]] = {name: [] for name in PRECISIONS}
    for seed in range(num_seeds):
        for precision in PRECISIONS:
            run = str(Path(folder) / f"{job.title}-{precision}-{seed}")
            result = train_here(replace(job.config, run_uri=run, precision=precision, seed=seed))
            logits, labels = predict(job, result)
            metrics = {name: score(logits, labels) for name, score in job.metrics.items()}
            results[precision].append((result, metrics))
            print(f"{job.title}, seed {seed}, {precision}: {metrics}, {result.seconds:.0f} s", flush=True)
    return results


def table(job: Job, results: dict[str, list[tuple[TrainResult, dict[str, float]]]]) -> list[list[str]]:
    """Returns a line per precision: means over the seeds, and the difference to fp32."""
    lines = []
    means = {
        precision: {name: mean(metrics[name] for _, metrics in runs) for name in job.metrics}
        for precision, runs in results.items()
    }
    for precision, runs in results.items():
        skipped = sum(record.skipped_steps for result, _ in runs for record in result.history)
        cells = []
        for name, value in means[precision].items():
            off = value / means["fp32"][name] - 1
            cells.append(f"{name} {value:.4f} ({off:+.2%})")
        lines.append([f"{job.title}, {precision}", ", ".join(cells), f"{skipped}"])
    return lines


def draw(path: str, runs: dict[str, dict[str, list[tuple[TrainResult, dict[str, float]]]]]) -> None:
    """Draws the mean loss by epoch, with a panel per job: training solid, validation dashed."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(
        1, len(runs), figsize=(6 * len(runs), 4.4), layout="constrained", squeeze=False
    )
    for axes, (title, results) in zip(panels[0], runs.items(), strict=True):
        for number, (precision, trained) in enumerate(results.items()):
            histories = [result.history for result, _ in trained]
            epochs = [record.epoch for record in histories[0]]
            for style, split in (("-", "train_loss"), ("--", "validation_loss")):
                values = np.mean([[record.value(split) for record in h] for h in histories], axis=0)
                # The curves overlap, so later ones are thinner.
                axes.plot(
                    epochs,
                    values,
                    style,
                    color=COLORS[precision],
                    linewidth=4.5 - 1.6 * number,
                    label=f"{precision}, {'training' if split == 'train_loss' else 'validation'} rows",
                )
        axes.set(title=title, xlabel="epoch", ylabel="loss")
        if max(epochs) > 10:
            axes.set_yscale("log")
        else:
            axes.set_xticks(epochs)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
    print(f"chart: {path}")


def main() -> None:
    """Trains both jobs in all precisions with `--repeats` seeds, prints a table and draws a chart."""
    args = harness.parse(
        __doc__, repeats=(3, 1), epochs=(recipes.NETWORK.epochs, 1), members=(3, 1), digits_epochs=(40, 1)
    )
    root = harness.flights_root(args)
    with tempfile.TemporaryDirectory() as folder:
        with cli.spark("ringspark precision", harness.MASTER) as spark:
            jobs = [
                flights_job(
                    root, feature_sizes(root), replace(recipes.NETWORK, epochs=args.epochs), args.members
                ),
                digits_job(spark, str(Path(folder) / "digits"), args.digits_epochs),
            ]
        runs = {job.title: train(job, args.repeats, folder) for job in jobs}
    lines = [line for job in jobs for line in table(job, runs[job.title])]
    harness.print_table(
        f"precision: validation rows after the last epoch (no test set: they chose the flights recipe), "
        f"means over {args.repeats} seeds, change to fp32 in parentheses",
        ["", "metrics", "skipped steps"],
        lines,
    )
    if args.chart:
        draw(args.chart, runs)


if __name__ == "__main__":
    main()
