"""Saves, loads and transforms with a model of some GiB, while the JVM has 1 GiB of memory.

Each step runs in a separate process, so that its peak can be measured. The table has the highest anonymous
memory and the highest resident memory of the Python driver and of the largest Python worker. Anonymous memory
is what a process needs; pages of mapped weights are shared and can be reclaimed. Nothing is trained: the
checkpoint contains random weights, generated layer by layer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import harness
import psutil

GIB = 1 << 30
# Layers of width x width fp32, 256 MiB each: 3 GiB.
LAYERS, WIDTH = (12, 2), (8192, 64)


def spec(layers: int, width: int) -> object:
    from ringspark.models import ModelSpec

    return ModelSpec("mlp", {"in_features": 32, "hidden": [width] * (layers + 1), "out_features": 1})


def step_checkpoint(folder: str, layers: int, width: int) -> None:
    """Writes a checkpoint like the one of a training."""
    from ringspark.estimators.training.checkpoint.weights import save_checkpoint

    save_checkpoint(os.path.join(folder, "checkpoint"), spec(layers, width).build())  # type: ignore[attr-defined]


def _session() -> object:
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master("local[2]").config("spark.driver.memory", "1g")
    session = builder.config("spark.ui.enabled", "false").getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    return session


def step_save(folder: str, layers: int, width: int) -> None:
    """Saves the model of the checkpoint."""
    from ringspark.estimators import TorchRegressionModel

    _session()
    model = TorchRegressionModel(model=spec(layers, width), inferenceBatchSize=64)
    model._set_trained(os.path.join(folder, "checkpoint"), [(1,)], None)
    model.write().overwrite().save(os.path.join(folder, "model"))


def step_load_and_transform(folder: str, layers: int, width: int) -> None:
    """Loads the saved model and predicts 256 rows in two Python workers."""
    from ringspark.estimators import TorchRegressionModel

    session = _session()
    model = TorchRegressionModel.load(os.path.join(folder, "model"))
    frame = harness.random_frame(session, 256)  # type: ignore[arg-type]
    rows = model.transform(frame.select("features")).select("prediction").collect()
    assert len(rows) == 256
    assert all(row.prediction is not None for row in rows)


STEPS = {"checkpoint": step_checkpoint, "save": step_save, "load + transform": step_load_and_transform}


class Watcher(threading.Thread):
    """The highest memory of a process and of its largest Python worker."""

    def __init__(self, pid: int) -> None:
        super().__init__(name="watcher", daemon=True)
        self._root = psutil.Process(pid)
        self._stop_asked = threading.Event()
        self.peaks = {"driver": [0, 0], "worker": [0, 0], "jvm": [0, 0]}

    def run(self) -> None:
        while not self._stop_asked.wait(0.05):
            try:
                processes = [self._root, *self._root.children(recursive=True)]
            except psutil.Error:
                return
            for process in processes:
                try:
                    # A process that the JVM has just forked is still the JVM, under the name of a thread.
                    kind = "jvm" if "java" in Path(process.exe()).name else "worker"
                    if process.pid == self._root.pid:
                        kind = "driver"
                    memory = process.memory_info()
                except psutil.Error:
                    continue
                found = (memory.rss - memory.shared, memory.rss)
                self.peaks[kind] = [max(a, b) for a, b in zip(self.peaks[kind], found, strict=True)]

    def finish(self) -> None:
        self._stop_asked.set()
        self.join()


def watch(command: list[str], **options: Any) -> list[int]:
    """Runs a command. Returns the peaks, own and RSS, of the driver, the largest worker and the JVM."""
    process = subprocess.Popen(command, **options)
    watcher = Watcher(process.pid)
    watcher.start()
    code = process.wait()
    watcher.finish()
    if code:
        raise SystemExit(f"{command} failed with {code}")
    return [n for kind in ("driver", "worker", "jvm") for n in watcher.peaks[kind]]


def main() -> None:
    options = harness.parse(__doc__, layers=LAYERS, width=WIDTH)
    with tempfile.TemporaryDirectory() as folder:
        lines = []
        for name in STEPS:
            started = time.perf_counter()
            command = [sys.executable, __file__, "--step", name, folder]
            command += [str(options.layers), str(options.width)]
            peaks = [f"{n / GIB:.2f}" for n in watch(command, stderr=subprocess.DEVNULL)]
            lines.append([name, f"{time.perf_counter() - started:.1f}", *peaks])
        size = os.path.getsize(Path(folder) / "model" / "weights" / "model.safetensors") / GIB
        info = json.loads((Path(folder) / "model" / "weights" / "checkpoint.json").read_text())
        harness.print_table(
            f"big_model: {size:.2f} GiB in {info['num_tensors']} tensors, spark.driver.memory=1g; "
            "peaks in GiB, own = anonymous memory",
            [
                *("step", "seconds", "driver own", "driver RSS", "worker own"),
                *("worker RSS", "JVM own", "JVM RSS"),
            ],
            lines,
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--step"]:
        STEPS[sys.argv[2]](sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
    else:
        main()
