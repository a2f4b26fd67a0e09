"""Cost of `inferenceOffload="disk"`: rows/s and memory of a transform task, compared with "none".

Each case runs in a separate process, in interleaved rounds, forked after importing all libraries, as Spark
forks its workers. It loads the network, predicts once to warm up, then `passes` times. Memory is the peak
above the memory before the network: resident memory, and address space, which `spark.executor.pyspark.memory`
limits. The last case drops the file from the kernel's page cache before each pass, as on a machine with too
little memory for the file. So it includes the rate of the disk.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

import harness
import numpy as np
import torch

from ringspark.estimators import TorchRegressionModel
from ringspark.estimators.training.checkpoint.weights import WEIGHTS, save_checkpoint
from ringspark.models import ModelSpec

MIB = 1 << 20
NONE, DISK, COLD = "none", "disk", "disk, file not in the page cache"
CASES = (NONE, DISK, COLD)


def step(case: str, folder: str, spec: ModelSpec, rows: int, passes: int) -> list[float]:
    """Predicts as a task does.

    Returns rows/s, resident MiB, MiB of address space, and the predictions' sum.
    """
    offload = NONE if case == NONE else DISK
    stage = TorchRegressionModel(model=spec, inferenceOffload=offload, inferenceBatchSize=rows)
    predictor = stage._set_trained(folder, [(1,)], None)._predictor()
    features = [np.random.default_rng(0).random((rows, harness.DIM), np.float32)]
    before = memory()
    module = predictor.load()
    expected = predictor.predict(module, features)
    descriptor = os.open(Path(folder) / WEIGHTS, os.O_RDONLY)
    seconds = 0.0
    for _ in range(passes):
        if case == COLD:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        found = predictor.predict(module, features)
        seconds += time.perf_counter() - start
        assert np.array_equal(found, expected)
    used = [(now - then) / MIB for now, then in zip(memory(), before, strict=True)]
    os.close(descriptor)
    return [passes * rows / seconds, *used, float(expected.sum())]


def memory() -> tuple[int, int]:
    """Returns the peak resident memory and address space of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines if line.startswith(("VmHWM", "VmPeak")))
    return int(found["VmHWM"].split()[0]) << 10, int(found["VmPeak"].split()[0]) << 10


def measure(
    found: dict[tuple[str, int], list[list[float]]],
    case: str,
    folder: str,
    spec: ModelSpec,
    rows: int,
    passes: int,
) -> float:
    """Runs one case in a new process. Returns rows/s and stores the other results."""
    context = multiprocessing.get_context("fork")
    with context.Pool(1) as pool:
        result = pool.apply(step, (case, folder, spec, rows, passes))
    found.setdefault((case, rows), []).append(result)
    return result[0]


def main() -> None:
    """Writes the weights, then measures in interleaved rounds."""
    options = harness.parse(__doc__, width=(4096, 256), layers=(8, 2), passes=(3, 1))
    sizes = [options.width] * (options.layers + 1)
    spec = ModelSpec("mlp", {"in_features": harness.DIM, "hidden": sizes, "out_features": 1})
    # A thread pool does not survive a fork, so this must come before any work.
    torch.set_num_threads(1)
    rows_per_pass = (4,) if options.tiny else (16, 256)
    found: dict[tuple[str, int], list[list[float]]] = {}
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(folder, spec.build())
        size = os.path.getsize(Path(folder) / WEIGHTS) / MIB
        for rows in rows_per_pass:
            cases = {
                case: partial(measure, found, case, folder, spec, rows, options.passes) for case in CASES
            }
            rates = harness.measure_in_turns(cases, options.repeats, warm_ups=0)
            sums = {one[3] for case in CASES for one in found[case, rows]}
            assert len(sums) == 1, f"predictions differ: {sums}"
            for case in CASES:
                rate = f"{median(rates[case]):,.1f}"
                ratio = f"{harness.median_ratio(rates[case], rates[NONE]):.2f}"
                used = [f"{median(one[i] for one in found[case, rows]):,.0f}" for i in (1, 2)]
                lines.append([case, str(rows), rate, ratio, *used])
    harness.print_table(
        f"inference_offload: weights of {size:,.0f} MiB, the largest tensor "
        f"{options.width**2 * 4 / MIB:,.1f} MiB, {options.repeats} rounds of {options.passes} passes",
        ["inferenceOffload", "rows per pass", "rows/s", "ratio", "MiB resident", "MiB address space"],
        lines,
    )


if __name__ == "__main__":
    main()
