"""Training on a CUDA device: rows/s of one rank against a plain PyTorch loop, by precision, offload and
reader.

Runs without Spark: the package's writer writes the shards, and one rank trains in this process. The plain
loop holds its batches in pinned host memory and copies each one when needed. Offload is compared with the
plain loop without offload. Without a CUDA device it prints a message and measures nothing.

    python tests/benchmarks/gpu_training.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import harness
import torch
from check.part import Setup
from check.shards import read_batches, train
from check.workloads import Workload, plain_rate, workload
from read_rate import array_data, write

from ringspark.pipelines import ShardManifest

DEVICE = "cuda:0"


class Case(NamedTuple):
    """Settings of a training."""

    precision: str
    activation_offload: str
    reader: str
    compile: bool = False


CASES = (
    Case("fp32", "none", "arrow"),
    Case("fp32", "none", "petastorm"),
    Case("bf16", "none", "arrow"),
    Case("fp16", "none", "arrow"),
    Case("bf16", "host", "arrow"),
    Case("bf16", "none", "arrow", compile=True),
)


def worker_rate(manifest: ShardManifest, work: Workload, setup: Setup, case: Case) -> float:
    """Returns rows/s of the last epoch of `train_worker` on one rank."""
    history = train(manifest, work, setup, epochs=2, **case._asdict()).history
    return manifest.num_rows / history[-1].seconds


def main() -> None:
    """Measures every case and the plain loop of its precision in interleaved rounds."""
    options = harness.parse(__doc__, rows=(1_000_000, 16_384))
    if not torch.cuda.is_available():
        print("gpu_training: skipped, there is no CUDA device here")
        return
    with tempfile.TemporaryDirectory() as name:
        setup = Setup(device=DEVICE, is_tiny=False, is_short=False, folder=Path(name))
        work = workload("mlp", setup)
        data = dict(array_data(options.rows).data)
        data["label"] = data["features"][:, 0] - data["features"][:, 1] * data["features"][:, 2]
        manifest = write(data, setup.folder / "shards")
        batches = read_batches(manifest, work.rows)
        cases: dict[str, Callable[[], float]] = {}
        for precision in ("fp32", "bf16", "fp16"):
            cases[f"plain {precision}"] = partial(plain_rate, work, batches, DEVICE, precision)
        for case in CASES:
            cases[f"{case}"] = partial(worker_rate, manifest, work, setup, case)
        rates = harness.measure_in_turns(cases, options.repeats)
    rows = []
    for case in CASES:
        own, plain = rates[f"{case}"], rates[f"plain {case.precision}"]
        title = ", ".join(case[:3]) + (", compiled" if case.compile else "")
        medians = [f"{median(values):,.0f}" for values in (own, plain)]
        rows.append([title, *medians, f"{harness.median_ratio(own, plain):.2f}"])
    harness.print_table(
        f"gpu_training: {torch.cuda.get_device_name()}, {work.spec.kwargs}, batch {work.rows:,}",
        ["precision, offload, reader", "rows/s", "plain loop", "ratio"],
        rows,
    )


if __name__ == "__main__":
    main()
