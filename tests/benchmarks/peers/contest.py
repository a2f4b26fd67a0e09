"""Shared code of the contestants: jobs, timing, and results.

A contestant is a program in a separate environment, so this file imports only packages that all environments
have. The driver passes an `Entry` as JSON. The contestant's last line is `MARK` and the results as JSON.

Jobs:
    network: rows of `harness.DIM` numbers, a network of 32-128-128-1, SGD, 2 workers, `BATCH_SIZE` rows each.
    reading: the same rows, shuffled, in batches as tensors, by one process.
    flights: the encoded table of etl.py, late or not; trained on months 1 to 8, judged on 10 to 12.
    table: the rows of tests/support/mixed_table.py: 30 columns of numbers, strings and dates, two classes.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
import harness
import numpy as np
import torch
from torch import nn

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MARK = "RESULT "
BATCH_SIZE = 1024  # rows per worker and step
LEARNING_RATE = 0.05
EPOCHS = 3
# Epochs of a whole fit in a warm session. The difference between the longer and the shorter fit is training
# time.
SLOPE_EPOCHS = (1, 5)
JUDGED_ROWS = 10_000
READ_EPOCHS = 4  # the first does not count
MAX_CATEGORIES = 64  # per column, for networks without embeddings; rare values share the last

Figures = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Job of one contestant.

    Attributes:
        variant: Variant that the contestant's program implements.
        numbers: Folder of Parquet files written by Spark: `features`, an array of numbers, and `label`.
        num_rows: Rows in `numbers`.
        flights: Folder with `train.parquet`, `test.parquet` and `sizes.json`, see flights_table.py.
        table: Folder with `train.parquet` and `test.parquet`, see tests/support/mixed_table.py.
        scratch: Empty folder for the contestant's files.
    """

    variant: str
    numbers: str
    num_rows: int
    flights: str
    table: str
    scratch: str

    def to_json(self) -> str:
        """Returns the entry as an argument of the contestant's command line."""
        return json.dumps(asdict(self))


def run(contestant: Callable[[Entry], Figures]) -> None:
    """Reads the entry from the command line, runs the contestant, and prints the results."""
    figures = contestant(Entry(**json.loads(sys.argv[1])))
    print(f"\n{MARK}{json.dumps(figures)}", flush=True)


def timed(what: str, function: Callable[[], object]) -> float:
    """Returns the seconds of one call, and logs them."""
    print(f"{time.strftime('%X')} {what} ...", flush=True)
    seconds = harness.seconds_of(function)
    print(f"{time.strftime('%X')} {what}: {seconds:.2f} s", flush=True)
    return seconds


def network() -> nn.Module:
    """Returns the network of job "network", with the same weights for every contestant."""
    torch.manual_seed(0)
    widths = (harness.DIM, 128, 128)
    blocks = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*blocks, nn.Linear(widths[-1], 1))


def measure_network(
    spark: SparkSession,
    entry: Entry,
    fit: Callable[[DataFrame, int], Any],
    predict: Callable[[Any, DataFrame], DataFrame],
) -> Figures:
    """Times whole fits on a cached frame, including the session's first, and the prediction of its rows.

    Args:
        fit: (frame, epochs) -> model: everything from the frame to the weights on the driver.
        predict: (model, frame) -> frame with a column `prediction`, lazy.
    """
    frame = spark.read.parquet(entry.numbers).cache()
    assert frame.count() == entry.num_rows
    models: list[Any] = []
    first = timed(f"first fit, {EPOCHS} epochs", lambda: models.append(fit(frame, EPOCHS)))
    short, long = (timed(f"fit, {epochs} epochs", partial(fit, frame, epochs)) for epochs in SLOPE_EPOCHS)
    slope = entry.num_rows * (SLOPE_EPOCHS[1] - SLOPE_EPOCHS[0]) / (long - short)
    predicted = predict(models[0], frame)
    transform = timed("transform", lambda: predicted.write.format("noop").mode("overwrite").save())
    judged = predicted.select("prediction", "label").limit(JUDGED_ROWS).collect()
    # An array of one number if the contestant's prediction is the network's whole output.
    errors = [float(np.ravel(row["prediction"])[0]) - row["label"] for row in judged]
    return {
        "first_fit": first,
        "slope": slope,
        "start": first - EPOCHS * entry.num_rows / slope,
        "transform": transform,
        "mse": float(np.mean(np.square(errors))),
    }


def measure_reading(entry: Entry, read_epoch: Callable[[int], int]) -> Figures:
    """Times epochs. `read_epoch` makes shuffled tensors of all rows and returns the number of rows."""
    seconds = []
    for epoch in range(READ_EPOCHS):
        start = time.perf_counter()
        rows = read_epoch(epoch)
        seconds.append(time.perf_counter() - start)
        assert rows == entry.num_rows, f"{rows:,} of {entry.num_rows:,} rows were read"
    return {"rate": entry.num_rows / float(np.median(seconds[1:]))}


def measure_flights(
    fit: Callable[[], Any], predict: Callable[[Any], tuple[Any, Any]], train_rows: int
) -> Figures:
    """Times one whole fit and the prediction of the test months.

    Args:
        predict: model -> labels and probabilities of class 1, in memory, one per test row.
    """
    from sklearn.metrics import roc_auc_score

    models: list[Any] = []
    fit_seconds = timed("fit", lambda: models.append(fit()))
    scored: list[tuple[Any, Any]] = []
    transform = timed("transform", lambda: scored.append(predict(models[0])))
    labels, probabilities = scored[0]
    return {
        "fit": fit_seconds,
        "rate": train_rows / fit_seconds,
        "transform": transform,
        "auc": float(roc_auc_score(labels, probabilities)),
    }


def measure_table(
    spark: SparkSession,
    folder: str,
    fit: Callable[[DataFrame], Any],
    predict: Callable[[Any, DataFrame], DataFrame],
) -> Figures:
    """Times one whole fit on `train.parquet` of the folder, and the prediction of `test.parquet`, with Spark.

    The frames are cached before, and `predict` returns a vector `probability`.
    """
    from pyspark.ml.functions import vector_to_array

    train, test = (spark.read.parquet(f"{folder}/{name}.parquet").cache() for name in ("train", "test"))
    train_rows, _ = train.count(), test.count()

    def predicted(model: Any) -> tuple[Any, Any]:
        one = vector_to_array("probability")[1].alias("one")
        rows = predict(model, test).select("label", one).toPandas()
        return rows["label"].to_numpy(), rows["one"].to_numpy()

    return measure_flights(lambda: fit(train), predicted, train_rows)
