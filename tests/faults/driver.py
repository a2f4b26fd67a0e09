"""A driver program like a user's: obeys lines of JSON, and each rank writes the rows of each step."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ringspark.estimators import TorchEstimator
from ringspark.estimators.options.mesh import AXES
from ringspark.estimators.parallel.mesh import find_data_shard
from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.models import ModelSpec

ANSWER = "ANSWER "
# A file in the diary's folder: the fault has happened, or there is none.
STRUCK = "struck"
LONGEST_WAIT_SECONDS = 120.0
NUM_FEATURES = 8
# The first tokens of a row are the digits of its number plus one, in reverse order.
BASE, NUM_DIGITS, NUM_TOKENS = 22, 3, 8


class Network(nn.Module):
    """A small network that records the rows of its last training step."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(NUM_FEATURES, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 1)
        )
        self.ids: list[int] = []

    def forward(self, features: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        # A rank without rows runs the network on a row of zeros, without gradients.
        if self.training and torch.is_grad_enabled():
            self.ids = ids.tolist()
        return self.layers(features)


class Diary(Callback):
    """Writes a line for every step of this rank, sleeps, and fails if the harness requests it.

    Args:
        folder: Local folder of the lines; a file `raise-<rank>` in it requests a failure.
        pause_seconds: Sleep after each step, so that a training of a few hundred small steps lasts seconds.
    """

    def __init__(self, folder: str, pause_seconds: float) -> None:
        self.folder = folder
        self.pause_seconds = pause_seconds

    def on_train_start(self, state: TrainingState) -> None:
        self._take_ids(state)
        self._write(state, "start")

    def on_step_end(self, state: TrainingState) -> None:
        self._write(state, "step", ids=self._take_ids(state))
        request = Path(self.folder, f"raise-{state.rank}")
        if state.step == state.num_steps:
            self._wait_for_the_fault(request)
        if request.exists():
            request.unlink()
            raise ValueError("a failure on request")
        time.sleep(self.pause_seconds)

    def _take_ids(self, state: TrainingState) -> list[int]:
        # A rank without rows in this step did not call the network.
        ids: list[int] = getattr(state.module, "ids", [])
        state.module.ids = []
        return ids

    def _wait_for_the_fault(self, request: Path) -> None:
        # The harness may be late on a busy machine, so the training must wait for the fault before it ends.
        end = time.monotonic() + LONGEST_WAIT_SECONDS
        struck = Path(self.folder, STRUCK)
        while not struck.exists() and not request.exists() and time.monotonic() < end:
            time.sleep(0.05)

    def _write(self, state: TrainingState, what: str, **more: Any) -> None:
        line = {name: getattr(state, name) for name in ("rank", "size", "epoch", "step")}
        line |= {"what": what, "pid": os.getpid(), "time": time.time(), **more}
        # Opens the file for each line and writes once. So a kill can cut a line, but not mix two.
        with open(os.path.join(self.folder, f"rank-{state.rank}-{os.getpid()}.jsonl"), "a") as file:
            file.write(json.dumps(line) + "\n")


class MeshDiary(Diary):
    """The diary of a rank with a shard of the network. It records the rows when they are read.

    Args:
        parallelism: The setting; all ranks of a replica should read the same rows.
    """

    def __init__(self, folder: str, pause_seconds: float, parallelism: dict[str, int]) -> None:
        super().__init__(folder, pause_seconds)
        self._sizes = {axis: parallelism.get(axis, 1) for axis in AXES}
        self._ids: list[int] = []

    def read(self, tokens: torch.Tensor) -> torch.Tensor:
        """Records the rows for `transformBatch`, which runs on every rank. Returns them unchanged."""
        numbers = (tokens[:, :NUM_DIGITS] - 1) @ torch.tensor([BASE**k for k in range(NUM_DIGITS)])
        # A rank without rows gets a row of zeros for its shape.
        self._ids = [number for number in numbers.tolist() if number >= 0]
        return tokens

    def _take_ids(self, state: TrainingState) -> list[int]:
        ids, self._ids = self._ids, []
        return ids

    def _write(self, state: TrainingState, what: str, **more: Any) -> None:
        super()._write(state, what, share=find_data_shard(self._sizes, state.rank)[0], **more)


def session(conf: dict[str, str]) -> Any:
    """Returns the Spark session; `conf` contains the master."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("ringspark-faults")
    for key, value in conf.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    return spark


def watch_executors(spark: Any, path: str) -> None:
    """Records every change of the number of registered executors, to measure Spark's replacement time."""
    context, last = spark.sparkContext._jsc.sc(), -1
    while True:
        try:
            number = context.getExecutorMemoryStatus().size() - 1  # without the driver's
        except Exception:
            return  # the session has ended
        if number != last:
            with open(path, "a") as file:
                file.write(json.dumps({"executors": number, "time": time.time()}) + "\n")
            last = number
        time.sleep(0.1)


def fit(command: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)  # the initial weights
    settings = {
        "loss": "mse",
        "inputCols": ["features", "id"],
        "labelCol": "label",
        "optimizer": "adamw",
        "learningRate": 0.01,
        "lrSchedule": "cosine",
        "seed": 5,
        "showProgress": False,
        **command["settings"],
    }
    notes = command["diary"], command["pause_seconds"]
    if command["network"] is None:
        settings |= {"model": Network(command["dropout"]), "callbacks": [Diary(*notes)]}
    else:
        diary = MeshDiary(*notes, settings["parallelism"])
        settings |= {
            "model": ModelSpec("transformer_classifier", command["network"]),
            "callbacks": [diary],
            "inputCols": ["tokens"],
            "transformBatch": diary.read,
        }
    try:
        model = TorchEstimator(**settings).fitOnShards(command["shards"])
        weights = {name: value.tolist() for name, value in model.module().state_dict().items()}
        told = ("checkpoint_errors", "restart_reasons", "preemption_reasons", "seconds_lost")
        found = {name: getattr(model.summary, name) for name in told}
        return {"ok": True, "weights": weights, **found}
    # Ctrl-C ends the fit, not this program, because the harness asks for a resume next.
    except (Exception, KeyboardInterrupt) as error:
        return {"ok": False, "type": type(error).__name__, "message": str(error)}


def write(spark: Any, command: dict[str, Any]) -> dict[str, Any]:
    """Writes shards of `rows` rows; `id` numbers them, and the label is a function of the features.

    An unused column makes the files large. A reader would read a small file once and keep it.
    """
    from pyspark.sql import functions as F

    from ringspark.pipelines import write_shards

    features = F.array(*[F.rand(seed).cast("float") for seed in range(NUM_FEATURES)]).alias("features")
    padding = F.array(*[F.rand(NUM_FEATURES + seed) for seed in range(64)]).alias("padding")
    digits = [F.floor(F.col("id") / BASE**k) % BASE for k in range(NUM_DIGITS)]
    others = [F.col("id") * k % BASE for k in range(NUM_DIGITS + 1, NUM_TOKENS + 1)]
    tokens = F.array(*[(number + 1).cast("int") for number in (*digits, *others)]).alias("tokens")
    frame = spark.range(0, command["rows"], 1, 2).select("id", features, padding, tokens)
    label = (F.col("features")[0] - F.col("features")[1]).cast("float").alias("label")
    frame = frame.select("id", "features", label, "padding", "tokens")
    write_shards(frame, command["uri"], num_files=2, row_group_rows=100)
    return {"ok": True}


def main() -> None:
    options = json.loads(sys.argv[1])
    # If the harness ignores Ctrl-C, its children must not inherit this.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    spark = session(options["conf"])
    if options["conf"]["spark.master"] != "local":
        threading.Thread(target=watch_executors, args=(spark, options["executors"]), daemon=True).start()
    print(ANSWER + json.dumps({"ok": True, "time": time.time()}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer = fit(command) if command["do"] == "fit" else write(spark, command)
        print(ANSWER + json.dumps(answer), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
