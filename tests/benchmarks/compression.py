"""Gradient compression: metrics and traffic of a training, and the time of a step over a slow link.

First, 2 workers train flights with every compressor and `--repeats` seeds. The table compares the metrics of
the validation rows with uncompressed gradients, and gives the ratio of the bytes that the ranks sent. The
optimizer is SGD with momentum, because error feedback is not sound with Adam's variance.

Then two hosts train a network of 5 million parameters over a link of 100 Mbit/s and of 1 Gbit/s, which is
shaped inside network namespaces of this machine. The rounds are interleaved in one gang.

    OMP_NUM_THREADS=1 make bench ARGS="compression --only links"
"""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import harness
import numpy as np
import torch
from encoded_flights import NETWORK, feature_sizes
from links import link_refusal, shaped_hosts, wire_bytes
from small_training import train_gang

from ringspark.estimators.collectives import Collective
from ringspark.estimators.options.compression import Compression
from ringspark.estimators.options.sync import AllReduce
from ringspark.estimators.parallel import STRATEGIES, SyncSettings
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.checkpoint.weights import map_checkpoint
from ringspark.estimators.training.precision import LossScaler
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.worker import TrainResult
from ringspark.jobs import cli
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest, open_reader

COMPRESSIONS: dict[str, Any] = {
    "none": "none",
    "fp16": "fp16",
    "bf16": "bf16",
    "powersgd, rank 2": {"name": "powersgd", "rank": 2},
    "topk, 1 %": {"name": "topk", "ratio": 0.01},
    "randomk, 5 %": {"name": "randomk", "ratio": 0.05},
    "qsgd, 4 bits": {"name": "qsgd", "bits": 4},
    "sign": "sign",
    "sparsify, 10 %": {"name": "sparsify", "ratio": 0.1},
    "gradiveq": {"name": "gradiveq", "slice": 64, "components": 8, "samples": 5, "refresh": 100},
}
GANGS = ("torch", "horovod")
WIDTH = 1024
SPEC = ModelSpec("mlp", {"in_features": WIDTH, "hidden": [WIDTH] * 5, "out_features": 1})
# The first steps have other directions and residuals than later steps.
WARM_UPS = 7


def momentum(rate: float, decay: float) -> Any:
    """Returns the factory of an optimizer for which error feedback is sound."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=rate, momentum=0.9, nesterov=True, weight_decay=decay)

    return make


def flights_config(options: Namespace, **changes: Any) -> TrainConfig:
    """Returns a training of embeddings and an MLP on the encoded flights by 2 workers."""
    from pyspark.ml import PipelineModel

    root, recipe = harness.flights_root(options), replace(NETWORK, epochs=options.epochs, **changes)
    with cli.spark("ringspark bench flights", harness.MASTER):
        sizes = feature_sizes(PipelineModel.load(str(root / "features")))
    return TrainConfig(
        shards_uri=str(root / "shards"),
        run_uri="",
        task="classification",
        model=recipe.spec(1, *sizes).to_json(),
        losses=("bce_with_logits_per_member",),
        input_columns=("categorical", "numeric"),
        label_columns=("label",),
        epochs=recipe.epochs,
        batch_size=1024,
        lr_schedule="one_cycle",
        num_workers=harness.NUM_WORKERS,
        collective="torch",
        reader="arrow",
    )


def judge(config: TrainConfig, result: TrainResult) -> dict[str, float]:
    """Returns metrics of the validation rows and the bytes that all ranks sent per step."""
    from sklearn.metrics import average_precision_score, roc_auc_score

    assert config.model is not None
    module = ModelSpec.from_json(config.model).build()
    map_checkpoint(result.checkpoint_uri, module)
    manifest = ShardManifest.load(config.shards_uri).select("validation")
    names = [*config.input_columns, *config.label_columns]
    logits, labels = [], []
    with torch.no_grad():
        for batch in open_reader(manifest, columns=names, batch_size=8192, engine="arrow").batches(0):
            inputs = [torch.from_numpy(np.array(batch[name])) for name in config.input_columns]
            logits.append(module.eval()(*inputs).reshape(-1).numpy())
            labels.append(batch["label"])
    found, label = np.concatenate(logits), np.concatenate(labels)
    costs = [record.cost for record in result.history if record.cost is not None]
    return {
        "ROC AUC": float(roc_auc_score(label, found)),
        "average precision": float(average_precision_score(label, found)),
        "log loss": float(np.logaddexp(0, -np.where(label > 0, 1, -1) * found).mean()),
        "bytes": sum(cost.bytes_sent or 0 for cost in costs) / result.steps,
    }


def train_cases(
    config: TrainConfig, syncs: Mapping[str, Any], optimizer: Any, num_seeds: int
) -> dict[str, dict[str, float]]:
    """Returns the means over the seeds of what `judge` finds, by case."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in syncs}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(num_seeds):
            for number, (name, sync) in enumerate(syncs.items()):
                run = str(Path(folder) / f"{seed}-{number}")
                result = train_gang(
                    replace(config, run_uri=run, seed=seed, sync=sync), UserObjects(optimizer=optimizer)
                )
                found[name].append(judge(config, result))
                print(f"seed {seed}, {name}: {found[name][-1]}", flush=True)
    return {name: {key: mean(run[key] for run in runs) for key in runs[0]} for name, runs in found.items()}


def print_losses(options: Namespace, names: list[str]) -> None:
    """Prints the metrics with every compressor."""
    config = flights_config(options, hidden=(1024, 512))
    syncs = {name: AllReduce(compression=Compression.of(COMPRESSIONS[name])) for name in names}
    found = train_cases(config, syncs, momentum(0.1, 1e-4), options.repeats)
    base = found["none"]
    harness.print_table(
        f"compression: flights, validation rows, means over {options.repeats} seeds, change in parentheses; "
        f"{harness.NUM_WORKERS} workers",
        ["", "ROC AUC", "average precision", "bytes, 1 /"],
        [
            [
                name,
                *(f"{own[key]:.4f} ({own[key] / base[key] - 1:+.2%})" for key in list(base)[:2]),
                f"{base['bytes'] / own['bytes']:.1f}",
            ]
            for name, own in found.items()
        ],
    )


class Training:
    """Training of one compressor on one rank of two hosts."""

    def __init__(self, compression: Any, collective: Collective, rows: int) -> None:
        torch.manual_seed(0)
        exchange = SyncSettings(sync=AllReduce(compression=Compression.of(compression)))
        make = momentum(0.01, 0.0)
        self.sync = STRATEGIES[exchange.sync.strategy].prepare(
            SPEC.build(), lambda module: make(module.parameters()), RankMesh.of(collective), exchange
        )
        self.scaler = LossScaler("fp32", torch.device("cpu"))
        generator = torch.Generator().manual_seed(collective.rank)
        self.x = torch.randn(rows, WIDTH, generator=generator)

    def step(self) -> None:
        self.sync.optimizer.zero_grad()
        with self.sync.micro_batch(last=True):
            self.sync.module(self.x).square().mean().backward()
        self.sync.reduce()
        self.sync.step(self.scaler)


def steps_of(collective: Collective, names: list[str], repeats: int, rows: int) -> dict[str, Any]:
    """Returns the seconds of each step and the bytes over the cable, by compression."""
    trainings = {name: Training(COMPRESSIONS[name], collective, rows) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    sent: dict[str, list[int]] = {name: [] for name in names}
    for turn in range(WARM_UPS + repeats):
        for name, training in trainings.items():
            collective.barrier()
            before, start = wire_bytes(), time.perf_counter()
            training.step()
            collective.barrier()
            if turn >= WARM_UPS:
                seconds[name].append(time.perf_counter() - start)
                sent[name].append(wire_bytes() - before)
    return {"seconds": seconds, "sent": sent}


def print_links(options: Namespace, names: list[str]) -> None:
    """Prints the step times over slow links."""
    if reason := link_refusal():
        print(f"compression: skipped, no shaped links: {reason}")
        return
    lines = []
    for megabits in (100, 1000):
        with shaped_hosts(2, mbit=megabits) as hosts:
            for collective in GANGS[: options.gangs]:
                told, *_ = hosts.run(steps_of, names, options.steps, options.rows, collective=collective)
                seconds, sent = told["seconds"], told["sent"]
                lines += [
                    [
                        f"{collective}, {megabits} Mbit/s, {name}",
                        f"{1000 * median(seconds[name]):,.0f}",
                        f"{1 / harness.median_ratio(seconds[name], seconds['none']):.1f}",
                        f"{median(sent['none']) / median(sent[name]):.1f}",
                    ]
                    for name in names
                ]
    size = sum(p.numel() for p in SPEC.build().parameters())
    harness.print_table(
        f"compression: a step of {size:,} parameters by a worker on each of two hosts, {options.rows} rows "
        f"each, median of {options.steps}; bytes of the network interface",
        ["", "ms", "speedup", "bytes, 1 /"],
        lines,
    )


def main() -> None:
    """Prints both tables."""
    sizes = {"compressors": (len(COMPRESSIONS), 2), "steps": (5, 1), "gangs": (2, 1)}
    made = harness.parser(__doc__, repeats=(3, 1), epochs=(3, 1), rows=(64, 2), **sizes)
    made.add_argument("--only", choices=("losses", "links"), help="one of the tables")
    options = made.parse_args()
    names = list(COMPRESSIONS)[: options.compressors]
    if options.only != "links":
        print_losses(options, names)
    if options.only != "losses":
        print_links(options, names)


if __name__ == "__main__":
    main()
