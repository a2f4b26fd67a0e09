"""The driver of a test over several hosts: `driver.py OPTIONS`; prints one line of JSON.

It trains a small regression and predicts, once for each entry of `fits`, the settings of a stage. Other
OPTIONS, as JSON: `conf` of the session, `rows`, `dim`, `hidden`, `steps`, a file to which the ranks write a
line after each step, and `pause`, the seconds of sleep after it. With `places`, it first asks each task for
its host, its Python, the file of ringspark, and whether the driver's environment exists there.
"""

from __future__ import annotations

import json
import sys
from socket import gethostname
from time import monotonic, sleep
from typing import Any

from ringspark.estimators.training.callbacks import Callback, TrainingState


class Steps(Callback):
    """Writes a line per step: time (all hosts here share the clock), rank, step and host."""

    def __init__(self, path: str, pause_seconds: float) -> None:
        self.path, self.pause_seconds = path, pause_seconds

    def on_step_end(self, state: TrainingState) -> None:
        with open(self.path, "a") as file:
            file.write(f"{monotonic()} {state.rank} {state.step} {gethostname()}\n")
        sleep(self.pause_seconds)


def session(conf: dict[str, str]) -> Any:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder
    for key, value in ({"spark.ui.enabled": "false", "spark.executor.cores": "1"} | conf).items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def find_places(spark: Any) -> list[list[str]]:
    prefix = sys.prefix

    def find(batches: Any) -> Any:
        import os

        import pyarrow as pa
        import torch

        import ringspark

        for _ in batches:
            pass
        found = [gethostname(), sys.executable, torch.__file__, ringspark.__file__]
        found.append(str(os.path.exists(prefix)))
        yield pa.RecordBatch.from_pylist([{"found": found}])

    rows = spark.range(0, 2, 1, 2).mapInArrow(find, "found array<string>", barrier=True).collect()
    return sorted(row.found for row in rows)


def main() -> None:
    options = json.loads(sys.argv[1])
    spark = session(options["conf"])
    from ringspark.estimators import TorchRegressor
    from ringspark.models import ModelSpec

    dim = options.get("dim", 2)
    # The same number of files on every cluster, so that every training sees the same batches.
    frame = spark.range(0, options.get("rows", 4000), 1, 2).selectExpr(
        f"array({', '.join(f'float(id % {7 + 4 * i} / {7 + 4 * i})' for i in range(dim))}) as features"
    )
    frame = frame.selectExpr("features", "features[0] - 2 * features[1] as y")
    layers = {"in_features": dim, "hidden": options.get("hidden", [16]), "out_features": 1}
    told = [{"places": find_places(spark)}] if options.get("places") else []
    for settings in options["fits"]:
        stage = TorchRegressor(
            **{
                "model": ModelSpec("mlp", layers), "labelCol": "y", "epochs": 3, "batchSize": 64,
                "numWorkers": 2, "timeoutSeconds": 60.0, "reader": "arrow", "showProgress": False, **settings,
            }
        )  # fmt: skip
        if "steps" in options:
            stage = stage.setCallbacks([Steps(options["steps"], options["pause"])])
        begun = monotonic()
        try:
            model = stage.fit(frame)
        except RuntimeError as error:
            told.append({"error": str(error)})
            continue
        summary, predictions = model.summary, model.transform(frame).select("prediction").collect()
        told.append(
            {
                "seconds": monotonic() - begun,
                "rows": len(predictions),
                "predictions": [row.prediction for row in predictions[:50]],
                "weights": [number for p in model.module().parameters() for number in p.flatten().tolist()],
                "restarts": summary.restart_reasons,
                "rate": summary.rows_per_second,
            }
        )
    print(json.dumps(told), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
