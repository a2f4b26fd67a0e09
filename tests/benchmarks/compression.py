"""Gradient compression: loss, traffic, and step time over a slow link.

First, 2 workers train flights and digits with every compressor and `--repeats` seeds. The table compares the
validation metrics with uncompressed gradients, and gives the ratio of the bytes that the ranks sent in an
epoch. All messages count, also uncompressed ones. The optimizer is SGD with momentum, because error feedback
is not sound with Adam's variance.

Then two hosts train a network of 5 million parameters over a link of 100 Mbit/s and of 1 Gbit/s. The table
has the step times, measured in interleaved rounds in one gang. The link is shaped inside network namespaces
of this machine.

    OMP_NUM_THREADS=1 make bench ARGS="compression --chart docs/compression.png"
"""

from __future__ import annotations

import json
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import harness
import precision
import torch
from links import link_refusal, shaped_hosts, wire_bytes
from small_training import train_gang

import recipes
from ringspark.estimators.collectives import Collective
from ringspark.estimators.options.compression import Compression
from ringspark.estimators.options.sync import AllReduce
from ringspark.estimators.parallel import STRATEGIES, SyncSettings
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.precision import LossScaler
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.jobs import cli
from ringspark.models import ModelSpec

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
NUM_WORKERS = 2
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


def convergence(
    job: precision.Job, make: Any, names: list[str], num_seeds: int, folder: str
) -> list[list[str]]:
    """Returns a line per compressor: metrics as means over the seeds, and the ratio of the bytes."""
    found: dict[str, list[Mapping[str, float]]] = {name: [] for name in names}
    sent: dict[str, list[float]] = {name: [] for name in names}
    for seed in range(num_seeds):
        for name in names:
            config: TrainConfig = replace(
                job.config,
                run_uri=str(Path(folder) / f"{job.title}-{seed}-{names.index(name)}"),
                seed=seed,
                num_workers=NUM_WORKERS,
                collective="torch",
                sync=AllReduce(compression=Compression.of(COMPRESSIONS[name])),
            )
            result = train_gang(config, UserObjects(optimizer=make))
            logits, labels = precision.predict(job, result)
            found[name].append({metric: score(logits, labels) for metric, score in job.metrics.items()})
            cost = [record.cost for record in result.history]
            sent[name].append(sum(c.bytes_sent or 0 for c in cost if c is not None) / result.steps)
            print(
                f"{job.title}, seed {seed}, {name}: {json.dumps(found[name][-1])}, "
                f"{sent[name][-1]:,.0f} bytes a step, {result.seconds:.0f} s",
                flush=True,
            )
    lines = []
    for name in names:
        cells = [f"{mean(sent['none']) / mean(sent[name]):.1f}x"]
        for metric in job.metrics:
            value, base = (mean(run[metric] for run in found[which]) for which in (name, "none"))
            cells.append(f"{value:.4f} ({value / base - 1:+.2%})")
        lines.append([f"{job.title}, {name}", ", ".join(cells[1:]), cells[0]])
    return lines


class Training:
    """Training of one compressor on one rank of two hosts."""

    def __init__(self, compression: Any, collective: Collective, rows: int) -> None:
        torch.manual_seed(0)
        exchange = SyncSettings(sync=AllReduce(compression=Compression.of(compression)))
        make = momentum(0.01, 0.0)
        self.sync = STRATEGIES[exchange.sync.strategy]().prepare(
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


def steps_of(
    collective: Collective, compressions: Mapping[str, Any], repeats: int, rows: int
) -> dict[str, Any]:
    """Returns the seconds of each step and the bytes over the cable, by compression."""
    trainings = {name: Training(value, collective, rows) for name, value in compressions.items()}
    seconds: dict[str, list[float]] = {name: [] for name in compressions}
    sent: dict[str, list[int]] = {name: [] for name in compressions}
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


def step_times(
    compressions: Mapping[str, Any], options: Namespace, rates: Sequence[int] = (100, 1000), ranks: int = 1
) -> list[list[str]]:
    """Returns a line per collective, rate and compression, with `ranks` workers on each of two hosts."""
    lines = []
    for megabits in rates:
        with shaped_hosts(2, mbit=megabits) as hosts:
            for collective in GANGS[: options.gangs]:
                results = hosts.run(
                    steps_of,
                    compressions,
                    options.steps,
                    options.rows,
                    collective=collective,
                    ranks_per_host=ranks,
                )
                told = results[0]
                seconds, sent = told["seconds"], told["sent"]
                for name in compressions:
                    lines.append(
                        [
                            f"{collective}, {megabits} Mbit/s, {name}",
                            f"{1000 * median(seconds[name]):,.0f}",
                            f"{1 / harness.median_ratio(seconds[name], seconds['none']):.1f}x",
                            f"{median(sent[name]):,.0f}",
                            f"{median(sent['none']) / median(sent[name]):.1f}x",
                        ]
                    )
                    print(*lines[-1], flush=True)
    return lines


def print_losses(options: Namespace, names: list[str]) -> None:
    """Prints the metrics of two data sets with every compressor."""
    root = harness.flights_root(options)
    with tempfile.TemporaryDirectory() as folder:
        with cli.spark("ringspark compression", harness.MASTER) as spark:
            recipe = replace(recipes.NETWORK, epochs=options.epochs, hidden=(1024, 512))
            jobs = [
                (precision.flights_job(root, precision.feature_sizes(root), recipe, 1), momentum(0.1, 1e-4)),
                (
                    precision.digits_job(
                        spark, str(Path(folder) / "digits"), options.digits_epochs, [512, 256]
                    ),
                    momentum(0.05, 1e-4),
                ),
            ]
        lines = [
            line for job, make in jobs for line in convergence(job, make, names, options.repeats, folder)
        ]
    harness.print_table(
        f"compression: validation rows after the last epoch, means over {options.repeats} seeds, change "
        f"in parentheses; {NUM_WORKERS} workers; reduction of bytes per step",
        ["", "metrics", "bytes"],
        lines,
    )


def print_links(options: Namespace, names: list[str]) -> None:
    """Prints the step times over slow links."""
    if reason := link_refusal():
        print(f"compression: skipped, no shaped links: {reason}")
        return
    size = sum(p.numel() for p in SPEC.build().parameters())
    harness.print_table(
        f"compression: a step of {size:,} parameters by a worker on each of two hosts, {options.rows} rows "
        f"each, median of {options.steps}; bytes of the network interface",
        ["", "ms", "speedup", "bytes sent", "bytes, 1 /"],
        step_times({name: COMPRESSIONS[name] for name in names}, options),
    )


def main() -> None:
    """Prints both tables."""
    made = harness.parser(
        __doc__,
        repeats=(3, 1),
        epochs=(3, 1),
        digits_epochs=(40, 1),
        compressors=(len(COMPRESSIONS), 2),
        steps=(5, 1),
        gangs=(2, 1),
        rows=(64, 2),
    )
    made.add_argument("--only", choices=("losses", "links"), help="one of the tables")
    options = made.parse_args()
    names = list(COMPRESSIONS)[: options.compressors]
    if options.only != "links":
        print_losses(options, names)
    if options.only != "losses":
        print_links(options, names)


if __name__ == "__main__":
    main()
