"""Runs ringspark in the four jobs.

The variant names collective and reader, or only the reader. With "+network", the ranks of one host all-reduce
over the collective's network instead of shared memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import contest
import harness
import torch
from encoded_flights import NETWORK

from ringspark.estimators import TorchClassifier, TorchRegressor
from ringspark.jobs import cli
from ringspark.pipelines import open_reader, write_shards

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def network(entry: contest.Entry) -> contest.Figures:
    """Trains with SGD at the batch size of the other contestants."""
    collective, reader, *network = entry.variant.split("+")
    if network:
        os.environ["RINGSPARK_SHARED_MEMORY"] = "0"  # before Spark starts: its Python workers inherit it

    def fit(frame: DataFrame, epochs: int) -> Any:
        return TorchRegressor(
            model=contest.network(),
            optimizer="sgd",
            learningRate=contest.LEARNING_RATE,
            epochs=epochs,
            batchSize=contest.BATCH_SIZE * harness.NUM_WORKERS,
            numWorkers=harness.NUM_WORKERS,
            collective=collective,
            reader=reader,
            storageUri=entry.scratch,
            showProgress=False,
        ).fit(frame)

    with cli.spark("ringspark", harness.MASTER) as spark:
        return contest.measure_network(spark, entry, fit, lambda model, frame: model.transform(frame))


def flights(entry: contest.Entry) -> contest.Figures:
    """Trains three networks with the recipe of encoded_flights.py."""
    collective, reader = entry.variant.split("+")
    sizes = json.loads(Path(entry.flights, "sizes.json").read_text())
    estimator = TorchClassifier(
        model=NETWORK.spec(3, sizes["cardinalities"], sizes["num_numeric"]),
        loss="bce_with_logits_per_member",
        inputCols=["categorical", "numeric"],
        optimizer="adamw",
        lrSchedule="one_cycle",
        epochs=NETWORK.epochs,
        learningRate=NETWORK.learning_rate,
        weightDecay=NETWORK.weight_decay,
        numWorkers=harness.NUM_WORKERS,
        collective=collective,
        reader=reader,
        storageUri=entry.scratch,
        showProgress=False,
    )
    with cli.spark("ringspark", harness.MASTER) as spark:
        return contest.measure_table(
            spark, entry.flights, estimator.fit, lambda model, frame: model.transform(frame)
        )


def table(entry: contest.Entry) -> contest.Figures:
    """Trains on a plain table: `fit` chooses everything."""
    estimator = TorchClassifier(
        labelCol="label", numWorkers=harness.NUM_WORKERS, storageUri=entry.scratch, showProgress=False
    )
    with cli.spark("ringspark", harness.MASTER) as spark:
        return contest.measure_table(
            spark, entry.table, estimator.fit, lambda model, frame: model.transform(frame)
        )


def reading(entry: contest.Entry) -> contest.Figures:
    """Reads shards with one engine. Opening is part of the first epoch only, as in a training."""
    with cli.spark("ringspark", harness.MASTER) as spark:
        manifest = write_shards(spark.read.parquet(entry.numbers), f"{entry.scratch}/shards")
    reader = open_reader(manifest, batch_size=contest.BATCH_SIZE, engine=entry.variant)
    return contest.measure_reading(entry, lambda epoch: count(reader.batches(epoch)))


def count(batches: Iterable[Mapping[str, Any]]) -> int:
    """Makes tensors of all batches. Returns the number of rows."""
    rows = 0
    for batch in batches:
        tensors = {name: torch.from_numpy(values) for name, values in batch.items()}
        rows += len(tensors["label"])
    return rows


def contestant(entry: contest.Entry) -> contest.Figures:
    """Runs a job. The variant contains the job: "network:torch+arrow"."""
    job, _, variant = entry.variant.partition(":")
    jobs = {"network": network, "flights": flights, "reading": reading, "table": table}
    return jobs[job](replace(entry, variant=variant))


if __name__ == "__main__":
    contest.run(contestant)
