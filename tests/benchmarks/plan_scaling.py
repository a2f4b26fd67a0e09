"""`plan_scaling` against trainings of 1 to 4 ranks on this host.

The step time is the median of a training after the first epoch. A model fitted to one rank at two batch
sizes, and to all-reduces of two sizes between two ranks, predicts 2, 3 and 4 ranks. A model fitted to the
steps of 1 and 2 ranks predicts 3 and 4. If there are fewer cores than ranks, the ranks share them, and the
prediction accounts for it. `--rows` is the rows per rank and step. The last row is torch's `DataParallel`:
one process with a replica on each of 2 GPUs, relative to the same process on one GPU.

    OMP_NUM_THREADS=1 make bench ARGS="plan_scaling"
"""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import harness
import numpy as np
import torch
from small_training import train_gang
from torch import nn
from torch.nn import functional as F
from written_shards import written

from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.extras.planning import fit_scaling, plan_scaling
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

SEQ_LEN, VOCAB = 64, 512
SIZES = {"vocab_size": VOCAB, "max_seq_len": SEQ_LEN, "dim": 128, "depth": 4, "num_heads": 4}
SPEC = ModelSpec("transformer_classifier", SIZES | {"out_features": 2})
CORES = len(os.sched_getaffinity(0))
RANKS = (1, 2, 3, 4)


class StepClock(Callback):
    """Writes the seconds of the median step after the first epoch, on rank 0."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ends: list[float] = []

    def on_step_end(self, state: TrainingState) -> None:
        if state.epoch > 1:
            self._ends.append(time.perf_counter())

    def on_train_end(self, state: TrainingState) -> None:
        if state.rank == 0:
            self._path.write_text(str(median(end - start for start, end in pairwise(self._ends))))


def step_seconds(folder: Path, manifest: ShardManifest, rows: int, num_ranks: int) -> float:
    """Returns the median step of a training, in seconds."""
    clock = folder / f"clock-{uuid.uuid4().hex}"
    config = TrainConfig(
        shards_uri=manifest.uri,
        run_uri=str(folder / f"run-{uuid.uuid4().hex}"),
        task="classification",
        model=SPEC.to_json(),
        losses=("cross_entropy",),
        input_columns=("ids",),
        label_columns=("label",),
        batch_size=rows * num_ranks,
        epochs=2,
        num_workers=num_ranks,
        collective="torch",
        reader="arrow",
    )
    train_gang(config, UserObjects(callbacks=(StepClock(clock),)))
    return float(clock.read_text())


def replica_seconds(devices: list[int], rows: int) -> float:
    """Returns the median step of `nn.DataParallel` over some GPUs, with `rows` for each of them."""
    module = nn.DataParallel(SPEC.build().to(devices[0]), device_ids=devices)
    optimizer = torch.optim.AdamW(module.parameters())
    ids = torch.randint(VOCAB, (rows * len(devices), SEQ_LEN), device=devices[0])
    taken = []
    for _ in range(20):
        start = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(module(ids), ids[:, 0] % 2).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return median(taken[10:])


def main() -> None:
    """Measures every number of ranks in interleaved rounds, and predicts them."""
    options = harness.parse(__doc__, rows=(32, 8), steps=(24, 8))
    rng = np.random.default_rng(0)
    few = max(1, options.rows // 4)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        cases = {}
        for rows, ranks in [(few, 1), *((options.rows, n) for n in RANKS)]:
            total = rows * ranks * options.steps
            columns = {
                "ids": rng.integers(0, VOCAB, (total, SEQ_LEN)),
                "label": rng.integers(0, 2, total),
            }
            groups = total // max(2, ranks)
            manifest = written(folder / f"shards-{rows}-{ranks}", columns, row_group_rows=groups)
            cases[rows, ranks] = partial(step_seconds, folder, manifest, rows, ranks)
        taken = harness.measure_in_turns(cases, options.repeats, warm_ups=0)
    measured = {n: median(taken[options.rows, n]) for n in RANKS}
    plan = plan_scaling(
        SPEC,
        (((options.rows, SEQ_LEN), "int64"), ((options.rows,), "int64")),
        RANKS,
        stepSeconds={few: median(taken[few, 1]), options.rows: measured[1]},
        coresPerHost=CORES,
        repeats=max(3, options.repeats),
    )
    # An epoch with the same number of rows for any number of ranks, without sharing cores.
    crowding = {n: max(1.0, n / CORES) for n in RANKS}
    two = fit_scaling({n: measured[n] / crowding[n] / n for n in (1, 2)})
    lines = []
    for n in RANKS:
        from_one, from_two = plan.of(n).step_seconds, two.time(n) * n * crowding[n]
        lines.append(
            [
                f"{n}" + (" (shared cores)" if n > CORES else ""),
                f"{1e3 * measured[n]:.1f}",
                f"{1e3 * from_one:.1f} ({from_one / measured[n] - 1:+.1%})" if n > 1 else "fitted",
                f"{1e3 * from_two:.1f} ({from_two / measured[n] - 1:+.1%})" if n > 2 else "fitted",
            ]
        )
    cells = ["needs 2 GPUs", "", ""]
    if torch.cuda.device_count() >= 2:
        one, both = (replica_seconds(devices, options.rows) for devices in ([0], [0, 1]))
        cells = [f"{1e3 * both:.1f} ({both / one:.2f} of 1 GPU)", "", ""]
    lines.append(["nn.DataParallel", *cells])
    harness.print_table(
        f"plan_scaling: {SPEC.kwargs}, {options.rows} rows per rank and step, {CORES} cores, "
        f"{options.repeats} rounds",
        ["ranks", "step, ms", "predicted from 1 rank and all-reduces", "from 1 and 2 ranks"],
        lines,
    )


if __name__ == "__main__":
    main()
