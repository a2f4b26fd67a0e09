"""Context parallelism: memory per rank and time of a step, by row length and attention method.

Trains a causal transformer with AdamW on longer and longer rows, without Spark. Every rank is pinned to a
core. One rank with whole rows, while the other ranks wait, is compared with all ranks and sequence-sharded
rows, in interleaved rounds in one gang. Times belong to the slowest rank. `peak` is the peak of torch's
allocations in one step on the first rank, without earlier allocations. `sent` is the bytes per rank and step,
with gradients.

    OMP_NUM_THREADS=1 make bench ARGS="long_rows"
"""

from __future__ import annotations

import json
import os
from argparse import Namespace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import harness
import torch
from peak_memory import peak_bytes
from torch.nn import functional as F

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.launch.local import run_spawned
from ringspark.estimators.parallel.data.gradient_all_reduce import GradientAllReduce
from ringspark.estimators.training.phase import Status
from ringspark.extras.model_parallel.sequence import CONTEXTS
from ringspark.extras.model_parallel.sequence.shard_sequence import shard_sequence
from ringspark.models import ModelSpec

WHOLE = "whole"
SIZES = {"vocab_size": 256, "dim": 128, "num_heads": 4, "depth": 4}
MIB = 2**20
CORES = sorted(os.sched_getaffinity(0))


class Training:
    """One network on one rank, with whole or sequence-sharded rows."""

    def __init__(self, way: str, collective: Collective, seq: int) -> None:
        torch.manual_seed(0)
        module = ModelSpec("transformer_lm", {**SIZES, "max_seq_len": seq}).build()
        shard_sequence(module, collective, way)
        self.sync = GradientAllReduce(module, torch.optim.AdamW(module.parameters(), lr=1e-3), collective)
        self.ids = torch.randint(256, (1, seq))

    def step(self) -> None:
        self.sync.optimizer.zero_grad()
        with self.sync.micro_batch(last=True):
            outputs = self.sync.module(self.ids)
            F.cross_entropy(outputs[..., :-1], self.ids[:, 1:]).backward()  # type: ignore[no-untyped-call]
        self.sync.reduce()
        self.sync.optimizer.step()


def measure(
    options: Namespace, lengths: list[int], collective: Collective, device: str, status: Status
) -> str:
    """Returns peak, sent bytes and seconds of every method at every length. Runs on every rank."""
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), {CORES[collective.rank % len(CORES)]})
    told: dict[str, Any] = {}
    for seq in lengths:
        trainings = {WHOLE: Training("ring", LocalCollective(), seq)}
        trainings |= {way: Training(way, collective, seq) for way in CONTEXTS}
        for way, training in trainings.items():
            training.step()
            before = collective.bytes_sent
            peak = peak_bytes(training.step)
            told[f"{way} {seq}"] = {"peak": peak, "sent": collective.bytes_sent - before, "seconds": []}
        for _ in range(options.repeats):
            for way, training in trainings.items():
                collective.barrier()
                idles = way == WHOLE and collective.rank > 0
                seconds = 0.0 if idles else harness.seconds_of(training.step)
                slowest = collective.all_reduce(torch.tensor([seconds], dtype=torch.float64), "max")
                told[f"{way} {seq}"]["seconds"].append(slowest.item())
    return json.dumps(told)


def main() -> None:
    """Prints the cost of each method at each length."""
    options = harness.parse(__doc__, length=(1024, 32), ranks=(2, 2))
    lengths = [options.length * factor for factor in (1, 2, 4)]
    texts = run_spawned(options.ranks, "torch", partial(measure, options, lengths), timeout_seconds=600.0)
    told = json.loads(texts[0])
    rows = []
    for seq in lengths:
        whole = told[f"{WHOLE} {seq}"]
        for way in (WHOLE, *CONTEXTS):
            case = told[f"{way} {seq}"]
            rows.append(
                [
                    f"{seq:,} tokens, {'1 rank' if way == WHOLE else way}",
                    f"{case['peak'] / MIB:.1f}",
                    f"{case['peak'] / whole['peak']:.2f}",
                    f"{case['sent'] / MIB:.1f}",
                    f"{1000 * median(case['seconds']):,.0f}",
                    f"{harness.median_ratio(whole['seconds'], case['seconds']):.2f}",
                ]
            )
    harness.print_table(
        f"long_rows: a step of one row, causal transformer of {SIZES['depth']} blocks of width "
        f"{SIZES['dim']}, {options.ranks} ranks, median of {options.repeats}; MiB per rank",
        ["", "peak", "/ 1 rank", "sent", "ms", "speedup"],
        rows,
    )


if __name__ == "__main__":
    main()
