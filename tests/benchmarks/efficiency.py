"""Weak scaling: rows/s of 1, 2 and 3 ranks, each pinned to a core, on a compute-bound network.

Every rank reads and trains the same number of rows per step from real shards, over both collectives. The rate
is the rate of the median step after the first epoch, which excludes startup and rare disturbances of the
machine. Efficiency is rows/s of n ranks / (n x rows/s of 1). The table also has the limit of the machine: as
many plain in-memory loops as ranks, pinned the same way, which share only caches, memory and clock rate. If
there are fewer cores than ranks, ranks share a core, and the limit shows the cost.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import harness
import numpy as np
import torch
from read_rate import write
from torch.nn import functional

from ringspark.estimators import user_code
from ringspark.estimators.collectives import Collective
from ringspark.estimators.launch.local import run_spawned
from ringspark.estimators.launch.train_task import TrainTask
from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.estimators.training.check.driver import check_training
from ringspark.estimators.training.optimizers.registry import make_optimizer
from ringspark.estimators.training.phase import Status
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

SEQ_LEN, VOCAB, BATCH = 64, 512, 48  # rows per step and rank
SPEC = ModelSpec(
    "transformer_classifier",
    {
        "vocab_size": VOCAB,
        "max_seq_len": SEQ_LEN,
        "dim": 128,
        "depth": 4,
        "num_heads": 4,
        "out_features": 2,
    },
)
BARE = "plain loops, nothing shared"
CORES = sorted(os.sched_getaffinity(0))


def pin(rank: int) -> None:
    """Pins every thread of this process to one core. New threads inherit it."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {CORES[rank % len(CORES)]})


@dataclass(frozen=True)
class PinnedTask:
    """`TrainTask` on one core."""

    task: TrainTask

    def __call__(self, collective: Collective, device: str, status: Status) -> str:
        # Pin here and not at the start, because the collective has created its threads by now.
        pin(collective.rank)
        return self.task(collective, device, status)


class StepClock(Callback):
    """Writes the seconds of the median step after the first epoch, on rank 0."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ends: list[float] = []

    def on_step_end(self, state: TrainingState) -> None:
        if state.epoch > 1:
            self._ends.append(time.perf_counter())

    def on_train_end(self, state: TrainingState) -> None:
        if state.rank == 0:
            self._path.write_text(str(median_step(self._ends)))


def median_step(ends: list[float]) -> float:
    """Returns the median time between two step ends."""
    return median(end - start for start, end in pairwise(ends))


def gang_rate(folder: Path, manifests: dict[int, ShardManifest], collective: str, num_ranks: int) -> float:
    """Returns rows/s over all ranks."""
    manifest, clock = manifests[num_ranks], folder / f"clock-{uuid.uuid4().hex}"
    objects = UserObjects(callbacks=(StepClock(clock),))
    config = TrainConfig(
        shards_uri=manifest.uri,
        run_uri=str(folder / f"run-{uuid.uuid4().hex}"),
        task="classification",
        model=SPEC.to_json(),
        losses=("cross_entropy",),
        input_columns=("ids",),
        label_columns=("label",),
        batch_size=BATCH * num_ranks,
        epochs=2,
        num_workers=num_ranks,
        collective=collective,
        reader="arrow",
    )
    config = check_training(config, objects, manifest).config
    task = PinnedTask(TrainTask(config=config, objects=user_code.dumps(objects)))
    run_spawned(num_ranks, collective, task, timeout_seconds=120)
    return BATCH * num_ranks / float(clock.read_text())


def plain_loop(rank: int, rows: int, start: Any, results: Any) -> None:
    """Trains over the same rows in memory, once to warm up and once timed. Runs in a process."""
    pin(rank)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = SPEC.build()
    optimizer = make_optimizer("adamw", module.parameters(), 1e-3, 0.0)
    ids, labels = (torch.from_numpy(values) for values in tokens(rows).values())
    batches = list(zip(ids.split(BATCH), labels.split(BATCH), strict=True))

    def epoch() -> list[float]:
        ends = []
        for rows_of, label in batches:
            optimizer.zero_grad()
            functional.cross_entropy(module(rows_of), label).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            ends.append(time.perf_counter())
        return ends

    epoch()
    start.wait()
    results.put(BATCH / median_step(epoch()))


def bare_rate(rows: int, num_loops: int) -> float:
    """Returns the total rows/s of plain loops that start together."""
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(num_loops), context.Queue()
    loops = [
        context.Process(target=plain_loop, args=(rank, rows, start, results)) for rank in range(num_loops)
    ]
    for loop in loops:
        loop.start()
    total = sum(results.get() for _ in loops)
    for loop in loops:
        loop.join()
    return total


def tokens(rows: int) -> dict[str, np.ndarray[Any, Any]]:
    """Returns random sequences, and the parity of their first token."""
    ids = np.random.default_rng(0).integers(0, VOCAB, size=(rows, SEQ_LEN), dtype=np.int64)
    return {"ids": ids, "label": ids[:, 0] % 2}


def main() -> None:
    """Measures every gang and its plain loops in interleaved rounds."""
    options = harness.parse(__doc__, rows=(BATCH * 8, 2 * BATCH), ranks=(3, 2))
    counts = range(1, options.ranks + 1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manifests = {n: write(tokens(options.rows * n), folder / f"shards-{n}") for n in counts}
        cases: dict[str, Callable[[], float]] = {}
        for num_ranks in counts:
            cases[f"{BARE} {num_ranks}"] = partial(bare_rate, options.rows, num_ranks)
            for collective in ("horovod", "torch"):
                cases[f"{collective} {num_ranks}"] = partial(
                    gang_rate, folder, manifests, collective, num_ranks
                )
        rates = harness.measure_in_turns(cases, options.repeats, warm_ups=0)
    rows = []
    for case in (BARE, "horovod", "torch"):
        for num_ranks in counts:
            found, one = rates[f"{case} {num_ranks}"], rates[f"{case} 1"]
            efficiency = harness.median_ratio(found, one) / num_ranks
            bound = harness.median_ratio(rates[f"{BARE} {num_ranks}"], rates[f"{BARE} 1"]) / num_ranks
            rows.append(
                [
                    f"{case}, {num_ranks}" + (" (shared cores)" if num_ranks > len(CORES) else ""),
                    f"{median(found):,.0f}",
                    f"{efficiency:.3f}",
                    f"{efficiency / bound:.3f}",
                ]
            )
    harness.print_table(
        f"efficiency: {SPEC.kwargs}, {BATCH} rows per rank and step, {options.rows:,} rows per rank, "
        f"{len(CORES)} cores, {options.repeats} rounds",
        ["ranks", "rows/s", "efficiency", "of the machine's limit"],
        rows,
    )


if __name__ == "__main__":
    main()
