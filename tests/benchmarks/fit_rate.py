"""Training rows/s, layer by layer, against a plain PyTorch loop over the same batches in memory.

The plain loop has one thread and one process, and no reader, collective or Spark. The difference to one rank
is the cost of reading and bookkeeping. A gang of 2 uses two cores. "inside" measures from the connected gang
to the written checkpoint; "whole call" is all of `fitOnShards`.
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
from torch.nn import functional

from ringspark.estimators import TorchRegressor
from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.optimizers.registry import make_optimizer
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.jobs import cli
from ringspark.pipelines import ShardManifest, open_reader, write_shards

BATCH_SIZE = 2048
LEARNING_RATE = 1e-3
GANGS = (("horovod", "petastorm"), ("horovod", "arrow"), ("torch", "petastorm"), ("torch", "arrow"))
BARE = "bare PyTorch loop"

Pair = tuple[torch.Tensor, torch.Tensor]


def load_batches(manifest: ShardManifest) -> list[Pair]:
    """Returns the batches of the first epoch as tensors: features (rows, DIM), label (rows,)."""
    reader = open_reader(manifest.select("train"), batch_size=BATCH_SIZE, engine="arrow")
    return [(torch.tensor(batch["features"]), torch.tensor(batch["label"])) for batch in reader.batches(0)]


def bare_rate(batches: list[Pair]) -> float:
    """Returns rows/s of a plain PyTorch loop over one epoch."""
    torch.manual_seed(0)
    module = harness.MLP.build()
    optimizer = make_optimizer("adamw", module.parameters(), LEARNING_RATE, 0.0)

    def epoch() -> None:
        for features, label in batches:
            optimizer.zero_grad()
            loss = functional.mse_loss(module(features).squeeze(-1), label)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return sum(len(label) for _, label in batches) / harness.seconds_of(epoch)


def worker_rate(shards_uri: str, folder: Path, reader: str) -> float:
    """Returns rows/s of one rank in this process, with the package's reader and training loop."""
    config = TrainConfig(
        shards_uri=shards_uri,
        run_uri=str(folder / f"worker-{uuid.uuid4().hex}"),
        task="regression",
        model=harness.MLP.to_json(),
        losses=("mse",),
        input_columns=("features",),
        label_columns=("label",),
        batch_size=BATCH_SIZE,
        learning_rate=LEARNING_RATE,
        collective="local",
        reader=reader,
    )
    result = train_here(config)
    return result.rows / result.seconds


class GangFit:
    """`fitOnShards` on 2 workers. One call measures two rates."""

    def __init__(self, shards_uri: str, folder: Path, collective: str, reader: str) -> None:
        self._shards_uri = shards_uri
        self._estimator = TorchRegressor(
            model=harness.MLP,
            numWorkers=harness.NUM_WORKERS,
            batchSize=BATCH_SIZE,
            learningRate=LEARNING_RATE,
            collective=collective,
            reader=reader,
            storageUri=str(folder),
            showProgress=False,
        )
        self._inside = 0.0

    def whole_call(self) -> float:
        """Trains and returns rows/s of the call."""
        models: list[Any] = []
        seconds = harness.seconds_of(lambda: models.append(self._estimator.fitOnShards(self._shards_uri)))
        summary = models[0].summary
        self._inside = summary.rows_per_second
        return float(summary.rows / seconds)

    def inside(self) -> float:
        """Returns rows/s inside the gang during the last call."""
        return self._inside


def main() -> None:
    """Writes the shards once, then measures all layers in interleaved rounds."""
    options = harness.parse(__doc__, rows=(500_000, 4_096))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, cli.spark("ringspark bench fit", harness.MASTER) as spark:
        folder = Path(name)
        manifest = write_shards(harness.random_frame(spark, options.rows), str(folder / "shards"))
        cases: dict[str, Callable[[], float]] = {BARE: partial(bare_rate, load_batches(manifest))}
        for reader in ("petastorm", "arrow"):
            cases[f"1 rank, {reader}"] = partial(worker_rate, manifest.uri, folder, reader)
        for collective, reader in GANGS:
            fit = GangFit(manifest.uri, folder, collective, reader)
            cases[f"2 x {collective}, {reader}: whole call"] = fit.whole_call
            cases[f"2 x {collective}, {reader}: inside"] = fit.inside
        rates = harness.measure_in_turns(cases, options.repeats)
    harness.print_table(
        f"fit_rate: rows/s, {options.rows:,} rows x {harness.DIM} fp32, MLP 32-128-128-1, 1 epoch, "
        f"global batch {BATCH_SIZE}, {options.repeats} rounds",
        ["", "median", "min", "max", "ratio to bare"],
        harness.rate_rows(rates, BARE),
    )


if __name__ == "__main__":
    main()
