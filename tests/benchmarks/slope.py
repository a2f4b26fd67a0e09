"""Training rows/s of 2 ranks in steady state, against plain loops with batches in memory.

The plain loops are two processes without communication, DDP, one flat all-reduce, and Horovod with a call per
tensor, in one group, and flat. "from memory" is this package's training on batches that its reader read once,
which excludes reading. "from shards" is the whole training. Steady state means the epochs after the first,
from the history. Every process has one thread.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
from torch import nn
from torch.nn import functional

from ringspark.estimators import user_code
from ringspark.estimators.collectives import Collective
from ringspark.estimators.environment import environment
from ringspark.estimators.launch.local import run_spawned
from ringspark.estimators.launch.train_task import TrainTask
from ringspark.estimators.training import worker
from ringspark.estimators.training.check.driver import check_training
from ringspark.estimators.training.phase import Status
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.worker import TrainResult
from ringspark.jobs import cli
from ringspark.pipelines import ShardManifest, write_shards

LEARNING_RATE = 1e-3
WARM_UP_STEPS = 10
DDP, FLAT, BARE = "DDP", "one flat all-reduce", "no exchange"
HOROVOD = {"Horovod, a tensor at a time": 0, "Horovod, one group": 1, "Horovod, flat": None}
OURS = {"torch + arrow": ("torch", "arrow"), "Horovod + petastorm": ("horovod", "petastorm")}
# Ranks on one host all-reduce through shared memory. "network" means Gloo or Horovod's ring.
SHARED_MEMORY = {"shared memory": "1", "network": "0"}

Step = Callable[[torch.Tensor, torch.Tensor], None]


def flat_gradients(module: nn.Module) -> torch.Tensor:
    """Returns one buffer; every parameter's gradient is a view of it."""
    parameters = list(module.parameters())
    buffer = torch.zeros(sum(p.numel() for p in parameters))
    for parameter, view in zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = view.view_as(parameter)
    return buffer


def make_step(name: str, module: nn.Module) -> Step:
    """Returns one step of a plain loop: forward, backward, all-reduce, update."""
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    buffer = flat_gradients(module) if name in (FLAT, "Horovod, flat") else None
    called: nn.Module = module
    exchange: Callable[[], object] = lambda: None  # noqa: E731
    if name == DDP:
        called = nn.parallel.DistributedDataParallel(module)
    elif name == FLAT:
        exchange = partial(torch.distributed.all_reduce, buffer)
    elif name in HOROVOD:
        import horovod.torch as hvd

        if buffer is None:
            groups = {"num_groups": HOROVOD[name]} if HOROVOD[name] else {}
            optimizer = hvd.DistributedOptimizer(
                optimizer, named_parameters=module.named_parameters(), op=hvd.Sum, **groups
            )
        else:
            exchange = partial(hvd.allreduce_, buffer, op=hvd.Sum, name="gradients")

    def step(features: torch.Tensor, label: torch.Tensor) -> None:
        if buffer is None:
            optimizer.zero_grad()
        else:
            buffer.zero_()
        functional.mse_loss(called(features).squeeze(-1), label).backward()  # type: ignore[no-untyped-call]
        exchange()
        optimizer.step()

    return step


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A plain loop on one rank over its rows in memory. The text is its seconds per epoch."""

    name: str
    rank_rows: int
    steps: int

    def __call__(self, collective: Collective, device: str, status: Status) -> str:
        generator = torch.Generator().manual_seed(collective.rank)
        batches = [
            (torch.rand(self.rank_rows, harness.DIM, generator=generator), torch.rand(self.rank_rows))
            for _ in range(self.steps)
        ]
        torch.manual_seed(0)
        step = make_step(self.name, harness.MLP.build())
        for batch in batches[:WARM_UP_STEPS]:
            step(*batch)
        collective.barrier()
        start = time.perf_counter()
        for batch in batches:
            step(*batch)
        collective.barrier()
        return json.dumps(time.perf_counter() - start)


def loop_rate(name: str, rank_rows: int, rows: int) -> float:
    """Returns rows/s of a plain loop on 2 ranks."""
    steps = max(1, rows // (rank_rows * harness.NUM_WORKERS))
    library = "horovod" if name in HOROVOD else "torch"
    loop = Loop(name=name, rank_rows=rank_rows, steps=steps)
    # Horovod's defaults, because a plain loop sends one tensor at a time and uses Horovod alone.
    with environment({"HOROVOD_FUSION_THRESHOLD": str(128 << 20), "HOROVOD_CYCLE_TIME": "1"}):
        texts = run_spawned(harness.NUM_WORKERS, library, loop, timeout_seconds=120)
    return steps * rank_rows * harness.NUM_WORKERS / max(map(json.loads, texts))


class KeptReader:
    """A reader that reads its first epoch from the shards, and returns the same batches in all epochs."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self._batches: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Any]:
        """Yields the batches of the first epoch."""
        self._batches = self._batches or list(self._reader.batches(0))
        yield from self._batches


def from_memory(task: TrainTask, collective: Collective, device: str, status: Status) -> str:
    """Trains in a new process with batches that are read once."""
    opened = worker.open_reader
    worker.open_reader = lambda *args, **options: KeptReader(opened(*args, **options))  # type: ignore[assignment,return-value]
    return task(collective, device, status)


def training_rate(config: TrainConfig, in_memory: bool) -> float:
    """Returns rows/s of this package's training on 2 ranks, in the epochs after the first."""
    objects = UserObjects()
    config = check_training(config, objects, ShardManifest.load(config.shards_uri)).config
    task = TrainTask(config=config, objects=user_code.dumps(objects))
    work = partial(from_memory, task) if in_memory else task
    texts = run_spawned(config.num_workers, config.collective, work, timeout_seconds=120)
    later = TrainResult.from_json(texts[0]).history[1:]
    return sum(record.rows for record in later) / sum(record.seconds for record in later)


def config_of(shards_uri: str, folder: Path, rank_rows: int, epochs: int, name: str) -> TrainConfig:
    """Returns the settings of the measured training."""
    collective, reader = OURS[name]
    return TrainConfig(
        shards_uri=shards_uri,
        run_uri=str(folder / uuid.uuid4().hex),
        task="regression",
        model=harness.MLP.to_json(),
        losses=("mse",),
        input_columns=("features",),
        label_columns=("label",),
        optimizer="sgd",
        learning_rate=LEARNING_RATE,
        epochs=epochs,
        batch_size=rank_rows * harness.NUM_WORKERS,
        num_workers=harness.NUM_WORKERS,
        collective=collective,
        reader=reader,
    )


def table_rows(rates: dict[str, list[float]]) -> list[list[str]]:
    """Returns rates with their ratios to DDP and to the best plain loop with the same library."""
    ratios = harness.rate_rows(rates, DDP)
    libraries = {
        False: [name for name in (DDP, FLAT) if name in rates],
        True: [name for name in HOROVOD if name in rates],
    }
    for line in ratios:
        best = max(libraries["Horovod" in line[0]], key=lambda name: sum(rates[name]), default=DDP)
        line.append(f"{harness.median_ratio(rates[line[0]], rates[best]):.2f}")
    return ratios


def measure(options: argparse.Namespace, shards_uri: str, folder: Path, rank_rows: int) -> None:
    """Prints the table of one batch size."""
    cases: dict[str, Callable[[], float]] = {
        name: partial(loop_rate, name, rank_rows, options.rows) for name in (BARE, DDP, FLAT, *HOROVOD)
    }
    for name, transport, place in itertools.product(OURS, SHARED_MEMORY, ("memory", "shards")):

        def rate(name: str = name, transport: str = transport, place: str = place) -> float:
            config = config_of(shards_uri, folder, rank_rows, options.epochs, name)
            with environment({"RINGSPARK_SHARED_MEMORY": SHARED_MEMORY[transport]}):
                return training_rate(config, place == "memory")

        cases[f"ringspark, {name}, by {transport}, from {place}"] = rate
    cases = {
        name: case for name, case in cases.items() if not options.only or options.only in name or name == DDP
    }
    rates = harness.measure_in_turns(cases, options.repeats, warm_ups=0)
    harness.print_table(
        f"slope: rows/s over {harness.NUM_WORKERS} ranks, {rank_rows:,} rows per rank and step, "
        f"{options.rows:,} rows x {harness.DIM} fp32, MLP 32-128-128-1, SGD, {options.repeats} rounds",
        ["", "median", "min", "max", "ratio to DDP", "ratio to the library's best loop"],
        table_rows(rates),
    )


def main() -> None:
    """Writes the shards once, then measures each batch size in interleaved rounds."""
    parser = harness.parser(__doc__, rows=(1_000_000, 4_096), epochs=(3, 2))
    parser.add_argument(
        "--rank-rows", type=cli.positive_int, nargs="+", metavar="N", help="rows per rank and step"
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="measure DDP and the cases that contain this"
    )
    options = parser.parse_args()
    rank_rows = options.rank_rows or ([256] if options.tiny else [1_024, 8_192])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with cli.spark("ringspark bench slope", harness.MASTER) as spark:
            manifest = write_shards(harness.random_frame(spark, options.rows), str(folder / "shards"))
        for size in rank_rows:
            measure(options, manifest.uri, folder, size)


if __name__ == "__main__":
    main()
