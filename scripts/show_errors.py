"""Triggers common errors and prints their messages as the page "Error messages"; `make docs` runs it.

Text that differs between runs is replaced by fixed text, so the page is the same on every machine.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # one of the errors needs a machine without a GPU

import torch
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from torch import nn

from ringspark.estimators import TorchClassificationModel, TorchClassifier, TorchRegressor
from ringspark.estimators.memory.pressure import check_memory, limits_on_driver
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest, write_shards

SPEC = ModelSpec("linear", {"in_features": 2, "out_features": 1})
# Host names, random file names, and sizes that depend on the version of the Parquet writer.
DIFFERS = {
    rf"host {re.escape(socket.gethostname())}\b": "host worker-1",
    r"\b[0-9a-f]{12}\b": "0f1e2d3c4b5a",
    r"has \d+ bytes, but the manifest says \d+": "has 460 bytes, but the manifest says 921",
}


class Broken(nn.Module):
    """Raises in the third training step of rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and torch.distributed.is_initialized():
            self.calls += 1
            if self.calls == 3 and torch.distributed.get_rank() == 1:
                raise ZeroDivisionError("a bug in the model")
        return self.linear(x)  # type: ignore[no-any-return]


def rollback(fit: Callable[..., Any]) -> Any:
    """Restores a checkpoint when there is none."""
    return fit(onNonFinite="rollback", checkpointEverySeconds=0)


def cannot_fit(root: Path) -> None:
    """Checks a training on workers with 1 GiB for Python. A running session cannot set this limit."""
    config = TrainConfig(
        shards_uri="",
        run_uri="",
        input_columns=("features",),
        label_columns=("label",),
        model=ModelSpec("mlp", {"in_features": 2, "hidden": [4096] * 9, "out_features": 1}).to_json(),
        num_workers=2,
        collective="torch",
    )
    manifest = ShardManifest.load(str(root / "run" / "shards"))
    limits = limits_on_driver(2, {"spark.executor.pyspark.memory": "1g"}, is_here=False)
    check_memory(config, UserObjects(), manifest, limits)


def show(title: str, provoke: Callable[[], Any], folder: str = "") -> None:
    """Prints the first line of the error that `provoke` must raise, with /data instead of `folder`."""
    try:
        provoke()
    except (ValueError, TypeError, RuntimeError) as error:
        line = str(error).splitlines()[0].replace(folder or "\n", "/data")
        for pattern, text in DIFFERS.items():
            line = re.sub(pattern, text, line)
        print(f"**{title}**\n\n    {type(error).__name__}: {line}\n", flush=True)
    else:
        raise AssertionError(f"{title}: nothing was refused")


def main() -> None:
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    table = spark.range(60).select(
        F.array((F.col("id") / 60).cast("float"), F.lit(1.0).cast("float")).alias("features"),
        (F.col("id") % 2).cast("double").alias("label"),
        F.col("id").cast("string").alias("city"),
        F.when(F.col("id") != 7, F.col("id").cast("double")).alias("age"),
        F.when(F.col("id") == 7, F.lit(float("nan"))).otherwise(1.0).alias("clicked"),
        F.col("id").alias("customer"),
        F.when(F.col("id") == 7, F.array("id")).otherwise(F.array("id", "id")).alias("visits"),
    )
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)

        def fit(kind: Any = TorchClassifier, **changes: Any) -> Any:
            params: dict[str, Any] = {
                "model": SPEC,
                "batchSize": 8,
                "storageUri": str(root / "storage"),
                "showProgress": False,
            }
            return kind(**(params | changes)).fit(table)

        print("# Error messages\n")
        print("Made by `scripts/show_errors.py`; `/data` is its folder. After each error, the")
        print("storage folder holds no files of the attempt.\n")
        show("A missing column", lambda: fit(featuresCol="featurez"))
        show("A string column as a feature", lambda: fit(inputCols=["city"]))
        show("Nulls in a feature", lambda: fit(inputCols=["age"]))
        show("Arrays of several lengths", lambda: fit(inputCols=["visits"]))
        show("NaN in a label", lambda: fit(labelCol="clicked"))
        show("Labels out of range", lambda: fit(labelCol="customer"))
        empty = table.where("customer < 0")
        show("An empty DataFrame", lambda: TorchClassifier(model=SPEC).fit(empty))
        show("`numWorkers` above the slots", lambda: fit(numWorkers=8))
        show("`batchSize` below `numWorkers`", lambda: fit(numWorkers=9))
        wide = ModelSpec("linear", {"in_features": 2, "out_features": 3})
        show("A model whose output has the wrong shape", lambda: fit(TorchRegressor, model=wide))
        show(
            "A model that raises on rank 1 at step 3",
            lambda: fit(model=Broken(), numWorkers=2, collective="torch"),
        )
        (root / "file").write_text("")
        show("An unwritable `storageUri`", lambda: fit(storageUri=str(root / "file" / "inside")), folder)
        for title, size in (("A shard file cut in half", 0.5), ("A shard file deleted", 0.0)):
            uri = str(root / title.replace(" ", "-"))
            manifest = write_shards(table.select("features", "label"), uri)
            victim = Path(uri, manifest.files[0].path)
            if size:
                victim.write_bytes(victim.read_bytes()[: int(victim.stat().st_size * size)])
            else:
                victim.unlink()
            estimator = TorchClassifier(model=SPEC, showProgress=False)
            show(title, lambda estimator=estimator, uri=uri: estimator.fitOnShards(uri), folder)  # type: ignore[misc]
        show(
            "Loading a model from a folder without one",
            lambda: TorchClassificationModel.load(folder),
            folder,
        )
        model = fit(runUri=str(root / "run"), storageUri=None, epochs=1)
        show(
            "A run folder that is taken",
            lambda: fit(runUri=str(root / "run"), storageUri=None),
            folder,
        )
        show(
            "A run resumed with another setting",
            lambda: fit(runUri=str(root / "run"), storageUri=None, resume=True, weightDecay=0.5, epochs=1),
            folder,
        )
        show("`resume` without a folder", lambda: fit(resume=True))
        show("`onNonFinite='rollback'` without checkpoints", lambda: rollback(fit))
        show("A missing column in transform", lambda: model.transform(table.drop("features")))
        show("A training that does not fit into a worker's memory", lambda: cannot_fit(root))
        show("`useGpu` on a host without a GPU", lambda: fit(useGpu=True))
        show("An unknown optimizer name", lambda: TorchClassifier(model=SPEC, optimizer="adamm"))
        show("A misspelled Param", lambda: TorchClassifier(model=SPEC, bachSize=8))  # type: ignore[call-arg]
        left = (
            sorted(path.name for path in (root / "storage").iterdir()) if (root / "storage").exists() else []
        )
        assert not left, f"left behind: {left}"
    spark.stop()


if __name__ == "__main__":
    main()
