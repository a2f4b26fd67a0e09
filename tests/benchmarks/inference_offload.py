"""What `inferenceOffload="disk"` costs: rows/s and memory of what a task of transform does, against "none".

Each case runs in a process of its own, in turns: it loads the network, predicts once to begin with, then
`passes` times. Memory is the highest above what the process had with all libraries and before the network:
resident, and address space, which `spark.executor.pyspark.memory` limits. The last case drops the file from
the kernel's page cache before each pass, as a machine does whose memory cannot hold the file; so the disk's
rate is in it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

import harness

MIB = 1 << 20
NONE, DISK, COLD = "none", "disk", "disk, file not in the page cache"
CASES = (NONE, DISK, COLD)


def step(case: str, folder: str, width: int, layers: int, rows: int, passes: int) -> None:
    """Predicts as a task does; prints rows/s and MiB as JSON."""
    import numpy as np
    import torch

    from ringspark.estimators import TorchRegressionModel
    from ringspark.estimators.training.checkpoint.weights import WEIGHTS

    torch.set_num_threads(1)
    offload = NONE if case == NONE else DISK
    stage = TorchRegressionModel(model=spec(width, layers), inferenceOffload=offload, inferenceBatchSize=rows)
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
    print(json.dumps([passes * rows / seconds, *used, float(expected.sum())]))


def memory() -> tuple[int, int]:
    """The highest resident memory and address space of this process so far, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines if line.startswith(("VmHWM", "VmPeak")))
    return int(found["VmHWM"].split()[0]) << 10, int(found["VmPeak"].split()[0]) << 10


def spec(width: int, layers: int) -> harness.ModelSpec:
    return harness.ModelSpec(
        "mlp", {"in_features": harness.DIM, "hidden": [width] * (layers + 1), "out_features": 1}
    )


def measure(found: dict[tuple[str, int], list[list[float]]], case: str, rows: int, *options: str) -> float:
    """Runs one case; returns its rows/s, and keeps all that it printed."""
    command = [sys.executable, __file__, "--step", case, str(rows), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{case} failed: {done.stderr[-2000:]}")
    found.setdefault((case, rows), []).append(json.loads(done.stdout.splitlines()[-1]))
    return float(found[case, rows][-1][0])


def main() -> None:
    """Writes the weights, then measures in turns."""
    from ringspark.estimators.training.checkpoint.weights import WEIGHTS, save_checkpoint

    options = harness.parse(__doc__, width=(4096, 256), layers=(8, 2), passes=(3, 1))
    rows_per_pass = (4,) if options.tiny else (16, 256)
    found: dict[tuple[str, int], list[list[float]]] = {}
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(folder, spec(options.width, options.layers).build())
        size = os.path.getsize(Path(folder) / WEIGHTS) / MIB
        given = [folder, str(options.width), str(options.layers), str(options.passes)]
        for rows in rows_per_pass:
            cases = {case: partial(measure, found, case, rows, *given) for case in CASES}
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
        ["inferenceOffload", "rows a pass", "rows/s", "ratio", "MiB resident", "MiB address space"],
        lines,
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--step"]:
        case, rows, folder, width, layers, passes = sys.argv[2:]
        step(case, folder, int(width), int(layers), int(rows), int(passes))
    else:
        main()
