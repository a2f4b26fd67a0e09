"""`plan_scaling` against trainings of 1 to 4 ranks on this host, and a published table of 1 to 8 GPUs.

The step time is the median of a training after the first epoch. A model fitted to one rank at two batch
sizes, and to all-reduces of two sizes between two ranks, predicts 2, 3 and 4 ranks. A model fitted to the
steps of 1 and 2 ranks predicts 3 and 4. If there are fewer cores than ranks, the ranks share them, and the
prediction accounts for it. The published table has minutes per epoch of a BERT training.

    python tests/benchmarks/plan_scaling.py --chart docs/plan_scaling.png

`--rows` is the rows per rank and step.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median

import harness
import numpy as np
from efficiency import SEQ_LEN, SPEC, VOCAB, StepClock
from read_rate import write

from ringspark.estimators import user_code
from ringspark.estimators.launch.local import run_spawned
from ringspark.estimators.launch.train_task import TrainTask
from ringspark.estimators.training.check.driver import check_training
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.extras.planning import FORMS, ScalingPlan, fit_scaling, plan_scaling
from ringspark.pipelines import ShardManifest

BERT = {1: 399.0, 2: 214.0, 4: 118.0, 8: 61.0}
CORES = len(os.sched_getaffinity(0))
RANKS = (1, 2, 3, 4)


def step_seconds(folder: Path, manifest: ShardManifest, rows: int, num_ranks: int) -> float:
    """Returns the median step of a training, in seconds."""
    clock = folder / f"clock-{uuid.uuid4().hex}"
    objects = UserObjects(callbacks=(StepClock(clock),))
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
    config = check_training(config, objects, manifest).config
    task = TrainTask(config=config, objects=user_code.dumps(objects))
    run_spawned(num_ranks, "torch", task, timeout_seconds=300)
    return float(clock.read_text())


def published() -> None:
    """Prints the errors of every form fitted to every two rows."""
    rows = []
    for form, pair in itertools.product(FORMS, itertools.combinations(BERT, 2)):
        fit = fit_scaling({n: BERT[n] for n in pair}, form)
        errors = [f"{fit.time(n) / BERT[n] - 1:+.1%}" if n not in pair else "" for n in BERT]
        rows.append([f"{form}, from {pair[0]} and {pair[1]}", *errors])
    header = ["form", *(f"{n}: {minutes:g} min" for n, minutes in BERT.items())]
    harness.print_table("plan_scaling: errors of predicted BERT epochs", header, rows)


def draw(path: str, measured: Mapping[int, float], plan: ScalingPlan) -> None:
    """Draws predicted and measured steps, and the published epochs, as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    here, there = figure.subplots(1, 2)
    ranks = list(measured)
    here.plot(ranks, [1e3 * plan.of(n).step_seconds for n in ranks], "-", label="predicted")
    here.plot(ranks, [1e3 * measured[n] for n in ranks], "o", label="measured")
    here.set(xlabel=f"ranks on {CORES} cores", ylabel="step, ms", xticks=ranks, title="this host")
    here.set_ylim(bottom=0)
    there.plot(list(BERT), [BERT[1] / (n * BERT[n]) for n in BERT], "o", label="measured")
    for form in FORMS:
        fit = fit_scaling({n: BERT[n] for n in (1, 2)}, form)
        there.plot(list(BERT), [fit.efficiency(n) for n in BERT], "-", label=f"{form}, from 1 and 2")
    there.set(xlabel="GPUs", ylabel="efficiency", xticks=list(BERT), title="BERT")
    there.set_ylim(0.5, 1.02)
    for axes in (here, there):
        axes.legend()
    figure.savefig(path, format="png", dpi=120)


def main() -> None:
    options = harness.parse(__doc__, rows=(32, 8), steps=(24, 8))
    rng = np.random.default_rng(0)
    few = max(1, options.rows // 4)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)

        def shards(rows: int, ranks: int) -> ShardManifest:
            total = rows * ranks * options.steps
            columns = {
                "ids": rng.integers(0, VOCAB, (total, SEQ_LEN)),
                "label": rng.integers(0, 2, total),
            }
            return write(columns, folder / f"shards-{rows}-{ranks}", total // max(2, ranks))

        made = {
            (rows, ranks): shards(rows, ranks)
            for rows, ranks in [(few, 1), *((options.rows, n) for n in RANKS)]
        }
        cases = {key: partial(step_seconds, folder, manifest, *key) for key, manifest in made.items()}
        start = time.perf_counter()
        taken = harness.measure_in_turns(cases, options.repeats, warm_ups=0)
        seconds = {key: median(values) for key, values in taken.items()}
    measured = {n: seconds[options.rows, n] for n in RANKS}
    plan = plan_scaling(
        SPEC,
        (((options.rows, SEQ_LEN), "int64"), ((options.rows,), "int64")),
        RANKS,
        stepSeconds={few: seconds[few, 1], options.rows: measured[1]},
        coresPerHost=CORES,
        repeats=max(3, options.repeats),
    )
    # An epoch with the same number of rows for any number of ranks, without sharing cores.
    crowding = {n: max(1.0, n / CORES) for n in RANKS}
    two = fit_scaling({n: measured[n] / crowding[n] / n for n in (1, 2)})
    rows = []
    for n in RANKS:
        from_two = two.time(n) * n * crowding[n]
        rows.append(
            [
                f"{n}" + (" (shared cores)" if n > CORES else ""),
                f"{1e3 * measured[n]:.1f}",
                f"{1e3 * plan.of(n).step_seconds:.1f}",
                f"{plan.of(n).step_seconds / measured[n]:.3f}" if n > 1 else "fitted",
                f"{1e3 * from_two:.1f}",
                f"{from_two / measured[n]:.3f}" if n > 2 else "fitted",
            ]
        )
    harness.print_table(
        f"plan_scaling: {SPEC.kwargs}, {options.rows} rows per rank and step, {CORES} cores, "
        f"{options.repeats} rounds, {time.perf_counter() - start:.0f} s",
        ["ranks", "step, ms", "from 1 rank and all-reduces", "ratio", "from 1 and 2 ranks", "ratio"],
        rows,
    )
    print(plan.facts)
    published()
    if options.chart:
        draw(options.chart, measured, plan)


if __name__ == "__main__":
    main()
