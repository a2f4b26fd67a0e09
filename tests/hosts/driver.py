"""The driver of a test over several hosts: `driver.py OPTIONS`; prints one line of JSON.

It trains a small regression and predicts. OPTIONS are JSON: `conf` of the session, `steps`, a file to which
the ranks write a line after each step, `pause`, their seconds of sleep then, `rows`, and Params.
"""

from __future__ import annotations

import json
import sys
from socket import gethostname
from time import monotonic, sleep
from typing import Any

from ringspark.estimators.training.callbacks import Callback, TrainingState


class Steps(Callback):
    """Writes a line for each step: the time on the clock that all hosts here share, rank, step and host."""

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


def main() -> None:
    settings = json.loads(sys.argv[1])
    spark = session(settings.pop("conf"))
    rows, steps, pause = (settings.pop(name, None) for name in ("rows", "steps", "pause"))
    from pyspark.ml.feature import VectorAssembler

    from ringspark.estimators import TorchRegressor
    from ringspark.models import ModelSpec

    # As many files on every cluster, so that every training sees the same batches.
    frame = spark.range(0, rows or 4000, 1, 2).selectExpr(
        "id % 7 / 7 as a", "id % 11 / 11 as b", "id % 7 / 7 - id % 11 / 5 as y"
    )
    frame = VectorAssembler(inputCols=["a", "b"], outputCol="features").transform(frame)
    stage = TorchRegressor(
        **{
            "model": ModelSpec("mlp", {"in_features": 2, "hidden": [16], "out_features": 1}),
            "labelCol": "y", "epochs": 3, "batchSize": 64, "numWorkers": 2, "timeoutSeconds": 60.0,
            "reader": "arrow", "showProgress": False, **settings,
        }
    )  # fmt: skip
    if steps:
        stage = stage.setCallbacks([Steps(steps, pause or 0.0)])
    begun = monotonic()
    try:
        model = stage.fit(frame)
    except RuntimeError as error:
        print(json.dumps({"error": str(error), "seconds": monotonic() - begun}), flush=True)
        return
    seconds = monotonic() - begun
    told = {
        "rows": model.transform(frame).count(),
        "weights": [number for p in model.module().parameters() for number in p.flatten().tolist()],
        "restarts": model.summary.restart_reasons,
        "rows_per_second": model.summary.rows_per_second,
        "seconds": seconds,
    }
    print(json.dumps(told), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
