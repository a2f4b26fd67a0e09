"""Timeline overhead: recorded steps compared with unrecorded steps of the same training.

One training on one rank records every 4th step. The cost of a recorded step lies between the end of the step
before and the end of the step after it. So these two steps are compared with the next two, which are not
recorded. There are thousands of such neighboring pairs, so that load of the machine affects both. The table
has wall time and the CPU time of the training's thread, which varies less on a busy machine. The network is
small, so that its step takes a few milliseconds; the overhead is the same in a longer step.

The second table measures the recording alone, around empty steps, also for unrecorded steps and for a
training without a timeline. The third table adds both up. The fourth measures the file, which a separate
thread writes.

With `--chart` it also draws some steps of a training on 3 ranks in separate processes, with every step
recorded, and counts the events of the trace for Perfetto.

    python tests/benchmarks/timeline_cost.py --chart docs/timeline.png
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import harness
import numpy as np
import torch
from checkpoint_overhead import interval
from read_rate import write

from ringspark.estimators import user_code
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.launch.local import run_spawned, train_here
from ringspark.estimators.launch.train_task import TrainTask
from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.estimators.training.check.driver import check_training
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.observation.timeline import NO_TIMELINE, StepKind, Timeline
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.extras.timeline.rank_timeline import MOST_SPANS, WRITE_SHARE, RankTimeline
from ringspark.extras.timeline.span_file import read_spans
from ringspark.extras.timeline.trace import chrome_trace, time_shares
from ringspark.extras.timeline.trace_picture import trace_picture
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

DIM, HIDDEN, BATCH, RANKS = 64, 256, 256, 3
SPEC = ModelSpec("mlp", {"in_features": DIM, "hidden": [HIDDEN] * 3, "out_features": 1})
PARTS: tuple[StepKind, ...] = ("forward", "backward", "exchange", "step")
TRIALS = 9
EVERY = 4
STEPS_AN_EPOCH = 1_000


class StepSeconds(Callback):
    """End of each step, in wall time and in CPU time of this thread."""

    def __init__(self) -> None:
        self.ends: dict[int, tuple[float, float]] = {}

    def on_step_end(self, state: TrainingState) -> None:
        self.ends[state.step] = time.perf_counter(), time.thread_time()


def config_of(manifest: ShardManifest, folder: Path, **changes: Any) -> TrainConfig:
    """Returns the config of a regression of the first feature."""
    config = TrainConfig(
        shards_uri=manifest.uri,
        run_uri=str(folder),
        task="regression",
        model=SPEC.to_json(),
        losses=("mse",),
        input_columns=("features",),
        label_columns=("label",),
        batch_size=BATCH,
        epochs=1,
        reader="arrow",
        checkpoint_every_seconds=0.0,
    )
    return replace(config, **changes)


def pairs_of_steps(manifest: ShardManifest, folder: Path, epochs: int) -> list[list[tuple[float, float]]]:
    """Returns wall and CPU seconds of each two steps with a recorded one, and of the two steps after them."""
    seconds = StepSeconds()
    config = config_of(manifest, folder / "run", timeline_every_steps=EVERY, epochs=epochs)
    result = train_here(config, UserObjects(callbacks=(seconds,)))
    (spans,) = read_spans(result.run_uri)
    assert spans.every == EVERY, "the file was full, so the steps at the end were recorded less often"
    # The first steps warm up, and the reader restarts in the last step of an epoch.
    per_epoch = result.steps // epochs
    recorded = range(min(10 * EVERY, result.steps // 2 // EVERY * EVERY), result.steps - 2, EVERY)
    chosen = [n for n in recorded if 0 < n % per_epoch <= per_epoch - 3]
    found: list[list[tuple[float, float]]] = []
    for kind in (0, 1):
        at = {step: ends[kind] for step, ends in seconds.ends.items()}
        found.append([(at[n + 1] - at[n - 1], at[n + 3] - at[n + 1]) for n in chosen])
    return found


def file_seconds(folder: Path) -> tuple[int, float]:
    """Returns the bytes of a rank's largest file, and the CPU seconds of one write of it."""
    state = SimpleNamespace(epoch=1, step=0)
    full = RankTimeline(1, LocalCollective(), str(folder / "full"), torch.device("cpu"))
    batch = Batch(inputs=(), labels=(torch.zeros(1),), weight=None)
    for _ in full.steps(repeat(batch, MOST_SPANS // (len(PARTS) + 1)), cast("Any", state)):
        for kind in PARTS:
            with full.span(kind):
                pass
        state.step += 1
    taken = []
    for _ in range(TRIALS):
        begin = time.process_time()
        full.close()
        taken.append(time.process_time() - begin)
    (file,) = (folder / "full").rglob("*.json")
    return file.stat().st_size, median(taken)


def recording_alone(folder: Path, every: int | None, num_steps: int) -> list[float]:
    """Returns the seconds per step of the timeline's calls, in several trials."""
    batch = Batch(inputs=(), labels=(torch.zeros(1),), weight=None)
    found = []
    for _ in range(TRIALS):
        state = SimpleNamespace(epoch=1, step=0)
        timeline: Timeline = NO_TIMELINE
        if every is not None:
            device = torch.device("cpu")
            timeline = RankTimeline(every, LocalCollective(), str(folder / "alone"), device)
        begin = time.thread_time()
        for _ in timeline.steps(repeat(batch, num_steps), cast("Any", state)):
            for kind in PARTS:
                with timeline.span(kind):
                    pass
            state.step += 1
        found.append((time.thread_time() - begin) / num_steps)
        timeline.close()
    return found


def train_ranks(manifest: ShardManifest, folder: Path) -> str:
    """Trains on ranks in new processes with every step recorded. Returns the run's folder."""
    config = config_of(
        manifest,
        folder / "gang",
        timeline_every_steps=1,
        num_workers=RANKS,
        collective="torch",
        batch_size=RANKS * BATCH,
    )
    config = check_training(config, UserObjects(), manifest).config
    run_spawned(RANKS, "torch", TrainTask(config=config, objects=user_code.dumps(UserObjects())))
    return config.run_uri


def main() -> None:
    """Prints the ratios, and draws with `--chart`."""
    args = harness.parse(__doc__, steps=(14_000, 40))
    torch.set_num_threads(1)
    per_epoch = min(args.steps, STEPS_AN_EPOCH)
    features = np.random.default_rng(0).normal(size=(per_epoch * BATCH, DIM)).astype(np.float32)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manifest = write({"features": features, "label": features[:, 0].copy()}, folder / "shards", BATCH)
        found = pairs_of_steps(manifest, folder, args.steps // per_epoch)
        table = []
        for kind, pairs in zip(("clock", "processor"), found, strict=True):
            more = [recorded - other for recorded, other in pairs]
            table.append(
                [
                    kind,
                    f"{1e3 * median(other for _, other in pairs) / 2:.3f}",
                    f"{1e6 * median(more):.1f}",
                    "{:.1f} to {:.1f}".format(*(1e6 * end for end in interval(more))),
                ]
            )
        harness.print_table(
            f"timeline_cost: {SPEC.kwargs}, {BATCH} rows per step, {len(found[0]):,} recorded steps and "
            "their neighbors",
            ["time by", "ms per step", "overhead of a recorded step, us", "95 % interval"],
            table,
        )
        step_seconds = median(other for _, other in found[1]) / 2
        alone = {every: recording_alone(folder, every, max(50, args.steps)) for every in (None, 10**9, 50, 1)}
        names = ("off", "on, but none", "every 50th", "every")
        harness.print_table(
            f"timeline_cost: the calls alone, CPU time, median of {TRIALS} trials of {args.steps:,} "
            "empty steps",
            ["recorded steps", "us per step", "of a step", "95 % interval"],
            [
                [
                    case,
                    f"{1e6 * median(values):.2f}",
                    f"{median(values) / step_seconds:.3%}",
                    "{:.3%} to {:.3%}".format(*(end / step_seconds for end in interval(values))),
                ]
                for case, values in zip(names, alone.values(), strict=True)
            ],
        )
        more = [recorded - other for recorded, other in found[1]]
        idle = median(alone[10**9]) - median(alone[None])
        harness.print_table(
            "timeline_cost: overhead of a timeline in a training, from both tables",
            ["recorded steps", "overhead", "95 % interval"],
            [
                [
                    case,
                    f"{(idle + median(more) / every) / step_seconds:.3%}",
                    "{:.3%} to {:.3%}".format(
                        *((idle + end / every) / step_seconds for end in interval(more))
                    ),
                ]
                for case, every in (("every 50th", 50), ("every", 1))
            ],
        )
        size, written = file_seconds(folder)
        harness.print_table(
            f"timeline_cost: full file of a rank, median of {TRIALS} writes",
            ["MB", "CPU ms per write", "largest share of time"],
            [[f"{size / 1e6:.2f}", f"{1e3 * written:.1f}", f"{WRITE_SHARE:.2%}"]],
        )
        if args.chart:
            run_uri = train_ranks(manifest, folder)
            trace_picture(run_uri, str(Path(args.chart).resolve()), num_steps=4)
            shares, num_events = time_shares(run_uri), len(chrome_trace(run_uri)["traceEvents"])
            kinds = sorted({kind for own in shares.values() for kind in own})
            harness.print_table(
                f"timeline_cost: shares of {RANKS} ranks, {num_events:,} events in the trace",
                ["rank", *kinds],
                [[str(rank), *(f"{own.get(kind, 0):.3f}" for kind in kinds)] for rank, own in shares.items()],
            )


if __name__ == "__main__":
    main()
