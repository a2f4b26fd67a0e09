"""What the timeline costs: a training without one, with every 50th step recorded, and with every step.

They train in one process, on one rank each, and take turns of `--stretch` steps, so that what the machine
does meanwhile happens to all; a ratio is of two stretches of one round. The network is small, so that its
step takes a few milliseconds: what is recorded costs the same in a longer step. The clocks are compared
before the first step, and the file is written by a thread, mostly in the turn of the one whose it is.
The comparison of "off" with itself, two trainings alike, says how much a ratio can be trusted. Because that
is more than the timeline costs, the second table has the recording alone, around steps that do nothing.

With `--chart` it also draws some steps of a training on 3 ranks in processes of their own, with every step
recorded, and checks the trace that Perfetto opens.

    python tests/benchmarks/timeline_cost.py --chart docs/timeline.png
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections import defaultdict
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
from ringspark.estimators.tracking.timeline import chrome_trace, time_shares
from ringspark.estimators.tracking.trace_picture import trace_picture
from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.estimators.training.driver_check import check_training
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.observation.timeline import RankTimeline, StepKind
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

DIM, HIDDEN, BATCH, RANKS = 64, 256, 256, 3
SPEC = ModelSpec("mlp", {"in_features": DIM, "hidden": [HIDDEN] * 3, "out_features": 1})
PARTS: tuple[StepKind, ...] = ("forward", "backward", "exchange", "step")
TRIALS = 9
CASES: dict[str, int | None] = {"off": None, "off again": None, "every 50th": 50, "every": 1}


class Turns:
    """Lets one of several trainings run at a time, round and round."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._next = 0
        self._changed = threading.Condition()
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    def wait_for(self, name: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._names[self._next] == name)

    def end(self) -> None:
        with self._changed:
            self._next = (self._next + 1) % len(self._names)
            self._changed.notify_all()


class TakesTurns(Callback):
    """Holds a training up until its turn, and notes the seconds of each turn."""

    def __init__(self, turns: Turns, name: str, stretch: int) -> None:
        self._turns = turns
        self._name = name
        self._stretch = stretch
        self._begin = 0.0

    def on_train_start(self, state: TrainingState) -> None:
        self._turns.wait_for(self._name)
        self._begin = time.perf_counter()

    def on_step_end(self, state: TrainingState) -> None:
        if state.step % self._stretch:
            return
        self._turns.seconds[self._name].append(time.perf_counter() - self._begin)
        self._turns.end()
        if state.step < state.num_steps:
            self._turns.wait_for(self._name)
            self._begin = time.perf_counter()


def config_of(manifest: ShardManifest, folder: Path, **changes: Any) -> TrainConfig:
    """A regression of the first feature."""
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


def seconds_by_case(
    manifest: ShardManifest, folder: Path, stretch: int, epochs: int
) -> dict[str, list[float]]:
    """Seconds of each turn of each case."""
    turns = Turns(list(CASES))
    threads = []
    for number, (name, every) in enumerate(CASES.items()):
        config = config_of(manifest, folder / f"run-{number}", timeline_every_steps=every, epochs=epochs)
        objects = UserObjects(callbacks=(TakesTurns(turns, name, stretch),))
        threads.append(threading.Thread(target=train_here, args=(config, objects)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return turns.seconds


def recording_alone(folder: Path, every: int, num_steps: int) -> list[float]:
    """Seconds per step that recording the parts of a step takes, in several trials."""
    batch = Batch(inputs=(), labels=(torch.zeros(1),), weight=None)
    found = []
    for _ in range(TRIALS):
        state = SimpleNamespace(epoch=1, step=0)
        timelines = RankTimeline(every, LocalCollective(), str(folder / "alone"), torch.device("cpu"))
        begin = time.perf_counter()
        for _ in timelines.steps(repeat(batch, num_steps), cast("Any", state)):
            for kind in PARTS:
                with timelines.span(kind):
                    pass
            state.step += 1
        found.append((time.perf_counter() - begin) / num_steps)
        timelines.close()
    return found


def train_ranks(manifest: ShardManifest, folder: Path) -> str:
    """Trains on ranks in processes of their own, with every step recorded; returns the run's folder."""
    config = config_of(
        manifest,
        folder / "gang",
        timeline_every_steps=1,
        num_workers=RANKS,
        collective="torch",
        batch_size=RANKS * BATCH,
    )
    config, _ = check_training(config, UserObjects(), manifest)
    run_spawned(RANKS, "torch", TrainTask(config=config, objects=user_code.dumps(UserObjects())))
    return config.run_uri


def main() -> None:
    """Prints the ratios, and draws if it is asked to."""
    args = harness.parse(__doc__, stretch=(50, 2), rounds=(120, 3))
    # Whole turns; every epoch ends with one.
    steps = args.stretch * args.rounds
    per_epoch = args.stretch * max(1, args.rounds // 10)
    rows = per_epoch * BATCH
    features = np.random.default_rng(0).normal(size=(rows, DIM)).astype(np.float32)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manifest = write({"features": features, "label": features[:, 0].copy()}, folder / "shards", BATCH)
        # The first two rounds warm up.
        taken = seconds_by_case(manifest, folder, args.stretch, -(-steps // per_epoch))
        seconds = {case: values[min(2, len(values) - 1) :] for case, values in taken.items()}
        table = []
        for case, values in seconds.items():
            ratios = [value / base for value, base in zip(values, seconds["off"], strict=True)]
            low, high = interval(ratios)
            table.append(
                [
                    case,
                    f"{1e3 * median(values) / args.stretch:.3f}",
                    f"{median(ratios):.4f}",
                    f"{low:.4f} to {high:.4f}",
                ]
            )
        harness.print_table(
            f"timeline_cost: {SPEC.kwargs}, {BATCH} rows a step, {len(seconds['off'])} rounds of "
            f"{args.stretch} steps of each",
            ["recorded steps", "ms a step", "to off", "95 % interval"],
            table,
        )
        step_seconds = median(seconds["off"]) / args.stretch
        alone = {every: recording_alone(folder, every, args.rounds * args.stretch) for every in (50, 1)}
        harness.print_table(
            f"timeline_cost: the recording alone, median of {len(alone[1])} times "
            f"{args.rounds * args.stretch:,} empty steps",
            ["recorded steps", "us a step", "of a step", "95 % interval"],
            [
                [
                    f"every {every}",
                    f"{1e6 * median(values):.2f}",
                    f"{median(values) / step_seconds:.3%}",
                    "{:.3%} to {:.3%}".format(*(end / step_seconds for end in interval(values))),
                ]
                for every, values in alone.items()
            ],
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
