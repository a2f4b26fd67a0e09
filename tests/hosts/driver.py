"""The driver of a test over several hosts: `driver.py MASTER FOLDER SETTINGS`; prints one line of JSON.

It trains a small regression with a worker on each host and predicts; SETTINGS are Params as JSON.
"""

from __future__ import annotations

import json
import sys
from time import monotonic


def main() -> None:
    master, folder, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    conf = settings.pop("conf", {})
    from pyspark.ml.feature import VectorAssembler
    from pyspark.sql import SparkSession

    from ringspark.estimators import TorchRegressor
    from ringspark.models import ModelSpec

    builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    for key, value in {"spark.executor.cores": "1", "spark.sql.shuffle.partitions": "4", **conf}.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    rows = spark.range(4000).selectExpr(
        "id % 7 / 7 as a", "id % 11 / 11 as b", "id % 7 / 7 - id % 11 / 5 as y"
    )
    rows = VectorAssembler(inputCols=["a", "b"], outputCol="features").transform(rows)
    stage = TorchRegressor(
        **{
            "model": ModelSpec("mlp", {"in_features": 2, "hidden": [16], "out_features": 1}),
            "labelCol": "y", "epochs": 3, "batchSize": 64, "numWorkers": 2, "timeoutSeconds": 60.0,
            "storageUri": folder, "reader": "arrow", "showProgress": False, **settings,
        }
    )  # fmt: skip
    begun = monotonic()
    model = stage.fit(rows)
    seconds = monotonic() - begun
    told = {
        "rows": model.transform(rows).count(),
        "weights": [p.flatten().tolist() for p in model.module().parameters()],
        "restarts": model.summary.restarts,
        "seconds": seconds,
    }
    print(json.dumps(told), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
