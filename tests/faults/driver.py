"""A driver program as a user would write one; `trainings.Driver` runs it and tells it what to fit.

It reads JSON commands from standard input, one a line, and answers each by a line of JSON that begins
with `ANSWER`. Every rank writes which rows it saw in which step to a file of its own on the local disk,
so that the harness can tell afterwards whether every row was seen once an epoch (see `rows.py`).
"""

from __future__ import annotations

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
from ringspark.estimators.parallel.mesh import AXES, find_data_shard
from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.models import ModelSpec

ANSWER = "ANSWER "
# In the folder of the lines: the fault has come, or none will.
STRUCK = "struck"
LONGEST_WAIT_SECONDS = 120.0
NUM_FEATURES = 8
# The first tokens of a row are the digits of its number plus one, the last digit first.
BASE, NUM_DIGITS, NUM_TOKENS = 22, 3, 8


class Network(nn.Module):
    """A small network that remembers which rows it was last trained on."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(NUM_FEATURES, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 1)
        )
        self.ids: list[int] = []

    def forward(self, features: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.ids = ids.tolist()
        return self.layers(features)


class Diary(Callback):
    """Writes a line for every step of this rank, takes its time, and fails if the harness asks for it.

    Args:
        folder: Local folder of the lines; a file `raise-<rank>` in it is the request to fail.
        pause_seconds: Sleep after each step: a training of a few hundred small steps then lasts seconds.
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
        state.module.ids = []  # type: ignore[assignment]
        return ids

    def _wait_for_the_fault(self, request: Path) -> None:
        # A busy harness may be late: the training does not end before the fault has come.
        end = time.monotonic() + LONGEST_WAIT_SECONDS
        struck = Path(self.folder, STRUCK)
        while not struck.exists() and not request.exists() and time.monotonic() < end:
            time.sleep(0.05)

    def _write(self, state: TrainingState, what: str, **more: Any) -> None:
        line = {
            "what": what,
            "rank": state.rank,
            "size": state.size,
            "epoch": state.epoch,
            "step": state.step,
            "pid": os.getpid(),
            "time": time.time(),
            **more,
        }
        # Opened each time: one write of one line, which a kill can cut but never mix with another.
        with open(os.path.join(self.folder, f"rank-{state.rank}-{os.getpid()}.jsonl"), "a") as file:
            file.write(json.dumps(line) + "\n")


class MeshDiary(Diary):
    """The diary of a rank that has a part of the network: notes the rows where they are read.

    Args:
        parallelism: The setting; ranks that are one copy of the network are to read the same rows.
    """

    def __init__(self, folder: str, pause_seconds: float, parallelism: dict[str, int]) -> None:
        super().__init__(folder, pause_seconds)
        self._sizes = {axis: parallelism.get(axis, 1) for axis in AXES}
        self._ids: list[int] = []

    def read(self, tokens: torch.Tensor) -> torch.Tensor:
        """For `transformBatch`, which sees the rows on every rank; returns them as they are."""
        numbers = (tokens[:, :NUM_DIGITS] - 1) @ torch.tensor([BASE**k for k in range(NUM_DIGITS)])
        # Of a rank without rows, one of zeros stands for their shape.
        self._ids = [number for number in numbers.tolist() if number >= 0]
        return tokens

    def _take_ids(self, state: TrainingState) -> list[int]:
        ids, self._ids = self._ids, []
        return ids

    def _write(self, state: TrainingState, what: str, **more: Any) -> None:
        super()._write(state, what, share=find_data_shard(self._sizes, state.rank)[0], **more)


def session(conf: dict[str, str]) -> Any:
    """The Spark session; `conf` has the master."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("ringspark-faults")
    for key, value in conf.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    return spark


def watch_executors(spark: Any, path: str) -> None:
    """Notes every change of the number of registered executors: how long Spark needs to replace one."""
    context, last = spark.sparkContext._jsc.sc(), -1
    while True:
        try:
            number = context.getExecutorMemoryStatus().size() - 1  # without the driver's own
        except Exception:
            return  # the session has ended
        if number != last:
            with open(path, "a") as file:
                file.write(json.dumps({"executors": number, "time": time.time()}) + "\n")
            last = number
        time.sleep(0.1)


def fit(command: dict[str, Any]) -> dict[str, Any]:
    """One `fitOnShards`; what became of it."""
    torch.manual_seed(0)  # the first weights
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
    start = time.time()
    try:
        model = TorchEstimator(**settings).fitOnShards(command["shards"])
        weights = {name: value.tolist() for name, value in model.module().state_dict().items()}
        return {
            "ok": True,
            "start": start,
            "end": time.time(),
            "weights": weights,
            "checkpoint_errors": model.summary.checkpoint_errors,
            "restart_reasons": model.summary.restart_reasons,
        }
    # Ctrl-C ends the fit, not this program: the harness asks for a resume next.
    except (Exception, KeyboardInterrupt) as error:
        return {
            "ok": False,
            "start": start,
            "end": time.time(),
            "type": type(error).__name__,
            "message": str(error),
        }


def write(spark: Any, command: dict[str, Any]) -> dict[str, Any]:
    """Shards of `rows` rows; `id` counts them, the label is a function of the features.

    What nobody reads makes the files large: of a small one, a reader keeps all that it has read once.
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
    write_shards(
        frame.select("id", "features", label, "padding", "tokens"),
        command["uri"],
        num_files=2,
        row_group_rows=100,
    )
    return {"ok": True}


def main() -> None:
    """Answers commands until standard input ends."""
    options = json.loads(sys.argv[1])
    # A harness that ignores Ctrl-C must not teach that to its children.
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
