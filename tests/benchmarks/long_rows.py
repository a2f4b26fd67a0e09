"""Context parallelism: memory per rank and time of a step, by row length and attention method.

Trains a causal transformer with AdamW on longer and longer rows, without Spark. Every rank is pinned to a
core. One rank with whole rows, while the other ranks wait, is compared with all ranks and sequence-sharded
rows, in interleaved rounds in one gang. Wall time and CPU time belong to the slowest rank; other programs of
the machine disturb CPU time less. `held` is the memory that a rank keeps between forward and backward pass,
without weights. `peak` is the peak of torch's allocations in one step on the first rank, counted by
`peak_memory`. Both exclude earlier allocations. `sent` is the bytes per rank and step, with gradients.

    OMP_NUM_THREADS=1 python tests/benchmarks/long_rows.py
"""

from __future__ import annotations

import json
import os
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
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
VOCABULARY = 256
SIZES = {"vocab_size": VOCABULARY, "dim": 128, "num_heads": 4, "depth": 4}
MIB = 2**20
CORES = sorted(os.sched_getaffinity(0))


class Training:
    """One network on one rank, with whole or sequence-sharded rows."""

    def __init__(self, way: str, collective: Collective, seq: int, rows: int) -> None:
        torch.manual_seed(0)
        module = ModelSpec("transformer_lm", {**SIZES, "max_seq_len": seq}).build()
        shard_sequence(module, collective, way)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        self.sync = GradientAllReduce(module, optimizer, collective)
        self.collective = collective
        self.ids = torch.randint(VOCABULARY, (rows, seq))
        self.held = 0

    def step(self) -> None:
        self.sync.optimizer.zero_grad()
        with self.sync.micro_batch(last=True):
            outputs = self.sync.module(self.ids)
            F.cross_entropy(outputs[..., :-1], self.ids[:, 1:]).backward()  # type: ignore[no-untyped-call]
        self.sync.reduce()
        self.sync.optimizer.step()

    def measure_held(self) -> None:
        """Measures the memory that the network holds.

        It excludes the loss, which every rank computes on whole rows.
        """
        with _held(self.sync.module) as total:
            outputs = self.sync.module(self.ids)
        self.held = total[0]
        outputs.sum().backward()
        self.sync.optimizer.zero_grad()


@contextmanager
def _held(module: torch.nn.Module) -> Iterator[list[int]]:
    """Yields a list that at the end has the bytes kept for the backward pass."""
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, Any] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return x

    total: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield total
    total.append(sum(storage.nbytes() for storage in kept.values()))


def measure(
    options: Namespace, lengths: list[int], collective: Collective, device: str, status: Status
) -> str:
    """Measures every method at every length in interleaved rounds.

    Returns held, peak, sent and seconds. Runs on every rank.
    """
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), {CORES[collective.rank % len(CORES)]})
    told: dict[str, Any] = {}
    for seq in lengths:
        trainings = {WHOLE: Training("ring", LocalCollective(), seq, options.rows)}
        trainings |= {way: Training(way, collective, seq, options.rows) for way in CONTEXTS}
        for way, training in trainings.items():
            training.step()
            training.measure_held()
            before = collective.bytes_sent
            peak = peak_bytes(training.step)
            told[f"{way} {seq}"] = {
                "held": training.held,
                "peak": peak,
                "sent": collective.bytes_sent - before,
                "seconds": [],
                "cpu": [],
            }
        for _ in range(options.repeats):
            for way, training in trainings.items():
                collective.barrier()
                idles = way == WHOLE and collective.rank > 0
                begin = time.process_time()
                seconds = 0.0 if idles else harness.seconds_of(training.step)
                mine = torch.tensor([seconds, time.process_time() - begin], dtype=torch.float64)
                slowest = collective.all_reduce(mine, "max").tolist()
                told[f"{way} {seq}"]["seconds"].append(slowest[0])
                told[f"{way} {seq}"]["cpu"].append(slowest[1])
    return json.dumps(told)


def main() -> None:
    """Prints the cost of each method at each length."""
    options = harness.parse(__doc__, rows=(1, 1), length=(1024, 32), ranks=(2, 2))
    lengths = [options.length * factor for factor in (1, 2, 4)]
    texts = run_spawned(options.ranks, "torch", partial(measure, options, lengths), timeout_seconds=600.0)
    told = json.loads(texts[0])
    rows = []
    for seq in lengths:
        whole = told[f"{WHOLE} {seq}"]
        cases = {f"{seq:,} tokens, 1 rank": whole}
        cases |= {f"{seq:,} tokens, {options.ranks} ranks, {way}": told[f"{way} {seq}"] for way in CONTEXTS}
        for name, case in cases.items():
            rows.append(
                [
                    name,
                    f"{case['held'] / MIB:.1f}",
                    f"{case['held'] / whole['held']:.2f}",
                    f"{case['peak'] / MIB:.1f}",
                    f"{case['peak'] / whole['peak']:.2f}",
                    f"{case['sent'] / MIB:.1f}",
                    f"{1000 * median(case['seconds']):,.0f}",
                    f"{harness.median_ratio(whole['seconds'], case['seconds']):.2f}",
                    f"{1000 * median(case['cpu']):,.0f}",
                    f"{harness.median_ratio(case['cpu'], whole['cpu']):.2f}",
                ]
            )
    harness.print_table(
        f"long_rows: a step of {options.rows} row, causal transformer of {SIZES['depth']} blocks of width "
        f"{SIZES['dim']}, median of {options.repeats}; MiB per rank",
        ["", "held", "of 1", "peak", "of 1", "sent", "ms", "speedup", "CPU ms", "of 1"],
        rows,
    )


if __name__ == "__main__":
    main()
