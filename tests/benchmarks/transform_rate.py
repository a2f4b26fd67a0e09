"""Prediction rows/s of a 3-layer MLP against plain `mapInArrow` functions over the same cached frame.

"Constant" reads the array column, as the model does, and returns one number per row: the upper bound of any
Python function of the column. The plain network computes this number with the same layers and nothing else:
the upper bound of any program that runs this network there. "Identity" returns all 32 numbers. A vector
column is also compared with the constant over arrays, because Spark passes vectors to `mapInArrow` as
structs, which is far slower than any prediction. Results go to Spark's "noop" sink, which evaluates every
column and stores none.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import harness
import pyarrow as pa
import torch

from ringspark.estimators import TorchClassifier, TorchRegressor
from ringspark.jobs import cli
from ringspark.models import ModelSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

CONSTANT = "mapInArrow constant"


def constant(batches: Iterable[Any]) -> Iterable[Any]:
    """Yields a zero for every input row. Runs in a Spark task."""
    for batch in batches:
        yield pa.RecordBatch.from_arrays([pa.repeat(0.0, batch.num_rows)], ["prediction"])


def bare_network(spec: ModelSpec, batches: Iterable[Any]) -> Iterable[Any]:
    """Yields the network's output for every row, without names and checks. Runs in a Spark task."""
    torch.set_num_threads(1)
    module = spec.build().eval()
    with torch.inference_mode():
        for batch in batches:
            numbers = batch.column(0).flatten().to_numpy().reshape(batch.num_rows, -1)
            rows = torch.from_numpy(numbers.copy())
            outputs = torch.cat([module(part) for part in rows.split(2048)])
            yield pa.RecordBatch.from_arrays([pa.array(outputs[:, 0].double().numpy())], ["prediction"])


def identity(batches: Iterable[Any]) -> Iterable[Any]:
    """Yields its input. Runs in a Spark task."""
    return batches


def evaluate(frame: DataFrame) -> None:
    """Computes every row and column, and discards them."""
    frame.write.format("noop").mode("overwrite").save()


def fit(estimator_class: type[Any], frame: DataFrame, folder: str) -> Any:
    """Returns a model with weights of any quality: one worker, few rows."""
    estimator = estimator_class(
        model=harness.MLP,
        collective="local",
        reader="arrow",
        storageUri=folder,
        showProgress=False,
    )
    return estimator.fit(frame)


def main() -> None:
    """Caches the frame as arrays and as vectors, then measures in interleaved rounds."""
    options = harness.parse(__doc__, rows=(1_000_000, 4_000))
    with (
        tempfile.TemporaryDirectory() as folder,
        cli.spark("ringspark bench transform", harness.MASTER) as spark,
    ):
        from pyspark.ml.functions import array_to_vector
        from pyspark.sql import functions as F

        frame = harness.random_frame(spark, options.rows)
        arrays = frame.select("features").cache()
        vectors = arrays.select(array_to_vector(F.col("features")).alias("features")).cache()
        few = frame.limit(1000).withColumn("label", (F.col("label") > 0).cast("float"))
        regression = fit(TorchRegressor, few, folder)
        classification = fit(TorchClassifier, few, folder)
        frames: dict[str, DataFrame] = {
            CONSTANT: arrays.mapInArrow(constant, "prediction double"),
            "mapInArrow bare network": arrays.mapInArrow(
                partial(bare_network, harness.MLP), "prediction double"
            ),
            "mapInArrow identity": arrays.mapInArrow(identity, arrays.schema),
            "regression, array column": regression.transform(arrays),
            "regression, vector column": regression.transform(vectors),
            "classification, array column": classification.transform(arrays),
            "classification, vector column": classification.transform(vectors),
        }
        cases: dict[str, Callable[[], float]] = {
            name: lambda frame=frame: options.rows / harness.seconds_of(partial(evaluate, frame))  # type: ignore[misc]
            for name, frame in frames.items()
        }
        rates = harness.measure_in_turns(cases, options.repeats)
    harness.print_table(
        f"transform_rate: rows/s, {options.rows:,} rows x {harness.DIM} fp32, MLP 32-128-128-1, "
        f"{harness.MASTER}, {options.repeats} rounds",
        ["", "median", "min", "max", "ratio to constant"],
        harness.rate_rows(rates, CONSTANT),
    )


if __name__ == "__main__":
    main()
