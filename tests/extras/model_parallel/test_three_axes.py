"""Eight workers on the axes data, tensor and pipeline at once train through Spark like one worker.

    python tests/extras/model_parallel/test_three_axes.py

prints the largest difference of the weights and the seconds of both fits.
"""

import json
import os
import subprocess
import sys
import tempfile
import time

import pytest
import torch

ROWS = 110  # the last batch has 10 rows


@pytest.mark.spark
@pytest.mark.telling
def test_three_axes_at_once_train_like_one_worker() -> None:
    # The session of the other tests has four task slots.
    run = subprocess.run([sys.executable, __file__], stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["difference"] < 1e-5
    assert found["losses"][0] == pytest.approx(found["losses"][1], rel=1e-5)


def main() -> None:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F

    from ringspark.estimators import Mesh, Pipeline, TorchClassifier
    from ringspark.models import ModelSpec

    spark = SparkSession.builder.master("local[8]").config("spark.ui.enabled", "false").getOrCreate()
    words = [(F.col("id") * (3 + 2 * place) + place) % 22 + 1 for place in range(11)]
    table = spark.range(0, ROWS, 1, 3).select(
        F.array(*words).alias("features"), (F.col("id") % 3).alias("label")
    )
    sizes = {"vocab_size": 23, "max_seq_len": 12, "dim": 16, "depth": 4, "num_heads": 4, "out_features": 3}
    mesh = Mesh(data=2, tensor=2, pipeline=Pipeline(2))
    ways = {"one worker": {}, "eight": {"numWorkers": 8, "parallelism": mesh, "gradientAccumulation": 2}}
    spec = ModelSpec("transformer_classifier", {**sizes, "padding_id": 0})
    common = {"model": spec, "collective": "torch", "epochs": 3, "batchSize": 20, "seed": 1}
    # Key biases have only rounding errors as gradients; Adam would turn them into full steps.
    common |= {"optimizer": "momentum", "learningRate": 0.05, "showProgress": False}
    weights, losses, seconds = [], [], {}
    with tempfile.TemporaryDirectory() as folder:
        for name, settings in ways.items():
            begun = time.monotonic()
            model = TorchClassifier(**common, storageUri=folder, **settings).fit(table)
            seconds[name] = round(time.monotonic() - begun, 1)
            losses.append([*model.summary.history.train_loss])
            weights.append(torch.cat([p.detach().flatten() for p in model.module().parameters()]))
    difference = float((weights[0] - weights[1]).abs().max())
    print(json.dumps({"difference": difference, "losses": losses, "seconds": seconds}))


if __name__ == "__main__":
    main()
