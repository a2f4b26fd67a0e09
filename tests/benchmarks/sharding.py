"""Sharding (ZeRO 1 and 2) on 2 ranks: memory, traffic and step rate, against data parallelism.

Trains a transformer with AdamW, without Spark. Bytes are counted after the last backward pass of a step and
before the gradient synchronization. At that point ZeRO 1 still has all gradients, and ZeRO 2 has the rank's
shard. Both ranks of a collective run all shardings in interleaved rounds, so ratios come from one run on one
machine.
"""

from __future__ import annotations

import json
import time
from argparse import Namespace
from functools import partial
from typing import Any

import harness
import torch
from held_bytes import held_bytes
from short_sync import sync_of
from torch.nn import functional as F

from ringspark.estimators.collectives import COLLECTIVES, Collective
from ringspark.estimators.launch.local import run_spawned
from ringspark.estimators.options.sync import SHARDINGS
from ringspark.estimators.parallel import STRATEGIES, SyncSettings
from ringspark.estimators.parallel.base import GradientSync
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.build import build_optimizer
from ringspark.estimators.training.phase import Status
from ringspark.estimators.training.precision import LossScaler
from ringspark.models import ModelSpec

SIZES = {"vocab_size": 1000, "max_seq_len": 64, "dim": 128, "num_heads": 4, "depth": 4, "out_features": 10}
SPEC = ModelSpec("transformer_classifier", {**SIZES, "dropout": 0.0})
SEQ = 64
MIB = 2**20


class Training:
    """Network of one sharding on one rank."""

    def __init__(self, sharding: str, collective: Collective, rows: int) -> None:
        torch.manual_seed(0)
        make = partial(build_optimizer, "adamw", groups=None, learning_rate=1e-3, weight_decay=0.01)
        self.sync: GradientSync = STRATEGIES[sync_of(sharding=sharding).strategy]().prepare(
            SPEC.build(), make, RankMesh.of(collective), SyncSettings()
        )
        self.collective = collective
        self.rows = rows
        self.steps = 0
        self.counted: dict[str, int] = {}
        self.scaler = LossScaler("fp32", torch.device("cpu"))

    def step(self) -> None:
        generator = torch.Generator().manual_seed(self.steps)
        ids = torch.randint(SIZES["vocab_size"], (self.rows, SEQ), generator=generator)
        labels = torch.randint(SIZES["out_features"], (self.rows,), generator=generator)
        mine = slice(self.collective.rank, None, self.collective.size)
        before = self.collective.bytes_sent
        self.sync.optimizer.zero_grad()
        with self.sync.micro_batch(last=True):
            loss = F.cross_entropy(self.sync.module(ids[mine]), labels[mine], reduction="sum") / self.rows
            (loss * self.sync.loss_factor).backward()  # type: ignore[no-untyped-call]
        if self.steps == 1:
            self.counted = held_bytes(self.sync)
        self.sync.reduce()
        self.sync.step(self.scaler)
        self.steps += 1
        self.sent = self.collective.bytes_sent - before

    def rate(self, steps: int) -> float:
        """Returns steps per second."""
        return steps / harness.seconds_of(lambda: [self.step() for _ in range(steps)])

    def weights(self) -> torch.Tensor:
        whole: list[Any] = list(self.sync.network.parameters())
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in whole]
        return torch.cat([p.detach().flatten() for p in whole])


def measure(
    shardings: list[str], options: Namespace, collective: Collective, device: str, status: Status
) -> str:
    """Runs on every rank."""
    trainings = {sharding: Training(sharding, collective, options.rows) for sharding in shardings}
    cases = {name: partial(training.rate, options.steps) for name, training in trainings.items()}
    rates = harness.measure_in_turns(cases, options.repeats)
    weights = {name: t.weights() for name, t in trainings.items()}
    return json.dumps(
        {
            name: {
                "state": training.counted,
                "sent": training.sent,
                "rates": rates[name],
                "difference": (weights[name] - weights["none"]).abs().max().item(),
            }
            for name, training in trainings.items()
        }
    )


def lines(collective: str, options: Namespace) -> list[list[str]]:
    """Returns one line per sharding that the collective supports."""
    shardings = [s for s in SHARDINGS if (s, collective) != ("parameters", "horovod")]
    work = partial(measure, shardings, options)
    result = json.loads(run_spawned(harness.NUM_WORKERS, collective, work, timeout_seconds=300)[0])
    return [
        [
            f"{collective}, {name}",
            *(f"{values['state'][kind] / MIB:.2f}" for kind in ("parameters", "gradients", "optimizer")),
            f"{values['sent'] / MIB:.2f}",
            f"{harness.median_ratio(values['rates'], result['none']['rates']):.2f}",
            f"{values['difference']:.1e}",
        ]
        for name, values in result.items()
    ]


def main() -> None:
    """Runs one gang per collective."""
    options = harness.parse(__doc__, rows=(16, 4), steps=(4, 2))
    start = time.monotonic()
    table = [
        line for collective in COLLECTIVES if collective != "local" for line in lines(collective, options)
    ]
    harness.print_table(
        f"sharding: 2 ranks, transformer of {SIZES['depth']} blocks, dim {SIZES['dim']}, AdamW, fp32, "
        f"{options.rows} rows of {SEQ} tokens per step, {options.repeats} rounds of {options.steps} steps "
        f"({time.monotonic() - start:.0f} s)",
        [
            "MiB per rank",
            "parameters",
            "gradients",
            "optimizer",
            "sent per step",
            "steps/s / none",
            "largest difference from none",
        ],
        table,
    )


if __name__ == "__main__":
    main()
