"""horovod.spark's TorchEstimator in job "network", with its defaults except for the job's settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import contest
import harness
import torch
from horovod.spark.common.backend import SparkBackend
from horovod.spark.common.store import LocalStore
from horovod.spark.torch import TorchEstimator
from torch.nn import functional

from ringspark.jobs import cli

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def contestant(entry: contest.Entry) -> contest.Figures:
    """Fits with its data cache. The second and third fit write no data, so the slope excludes writing."""
    store = LocalStore(entry.scratch)

    def fit(frame: DataFrame, epochs: int) -> Any:
        module = contest.network()
        # TorchEstimator multiplies the rate by the number of workers.
        rate = contest.LEARNING_RATE / harness.NUM_WORKERS
        return TorchEstimator(
            backend=SparkBackend(num_proc=harness.NUM_WORKERS, verbose=0),
            store=store,
            model=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=rate),
            loss=functional.mse_loss,
            input_shapes=[[-1, harness.DIM]],
            feature_cols=["features"],
            label_cols=["label"],
            batch_size=contest.BATCH_SIZE,
            epochs=epochs,
            verbose=0,
        ).fit(frame)

    def predict(model: Any, frame: DataFrame) -> DataFrame:
        return model.transform(frame).withColumnRenamed("label__output", "prediction")

    with cli.spark("horovod.spark", harness.MASTER) as spark:
        return contest.measure_network(spark, entry, fit, predict)


if __name__ == "__main__":
    contest.run(contestant)
