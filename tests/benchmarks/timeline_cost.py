"""What the timeline costs: a training without one, with every 50th step recorded, and with every step.

It is one training on one rank, whose epochs take turns: each round has an epoch of `--stretch` steps of every
case, in an order drawn anew, so that what the machine does meanwhile happens to all; a ratio is of two epochs
of one round. Beside the time by the clock stands the processor's time of all threads of the process: on a
machine that others use too it varies less, and it also has the thread that writes the file. The network is
small, so that its step takes a few milliseconds: what is recorded costs the same in a longer step. "off" is
there twice: how far these two are from each other says how much a ratio can be trusted.

The second table has the recording alone, around steps that do nothing, the third the writing of the file.

With `--chart` it also draws some steps of a training on 3 ranks in processes of their own, with every step
recorded, and counts the events of the trace that Perfetto opens.

    python tests/benchmarks/timeline_cost.py --chart docs/timeline.png
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import harness
import numpy as np
import torch
from checkpoint_overhead import interval
from read_rate import write

from ringspark.estimators import user_code
from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.launch.local import run_spawned, train_here
from ringspark.estimators.launch.train_task import TrainTask
from ringspark.estimators.tracking.timeline import chrome_trace, time_shares
from ringspark.estimators.tracking.trace_picture import trace_picture
from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.estimators.training.driver_check import check_training
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.observation import observed
from ringspark.estimators.training.observation.timeline import (
    MOST_SPANS,
    NO_TIMELINE,
    WRITE_SHARE,
    RankTimeline,
    RareKind,
    StepKind,
    Timeline,
)
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

DIM, HIDDEN, BATCH, RANKS = 64, 256, 256, 3
SPEC = ModelSpec("mlp", {"in_features": DIM, "hidden": [HIDDEN] * 3, "out_features": 1})
PARTS: tuple[StepKind, ...] = ("forward", "backward", "exchange", "step")
TRIALS = 9
# A timeline that is full records every second step only, so a new one takes its place before.
EPOCHS_A_TIMELINE = 30
CASES: dict[str, int | None] = {"off": None, "off again": None, "every 50th": 50, "every": 1}


class SwitchedTimeline:
    """Records the epochs of one training by turns in one way and in another: see `CASES`."""

    def __init__(self, every: int, world: Collective, run_uri: str, device: torch.device) -> None:
        """Made by the training in place of a `RankTimeline`; `every` is the number of its rounds."""
        self._make = partial(RankTimeline, world=world, run_uri=run_uri, device=device)
        self._order = order_of(every)
        self._used: dict[int, list[RankTimeline]] = {}
        self._now: Timeline = NO_TIMELINE

    def steps(self, batches: Iterator[Batch], state: TrainingState) -> Iterator[Batch]:
        every = CASES[self._order[state.epoch - 1]]
        if every is None:
            self._now = NO_TIMELINE
        else:
            used = self._used.setdefault(every, [])
            number = sum(CASES[case] == every for case in self._order[: state.epoch - 1])
            if number % EPOCHS_A_TIMELINE == 0:
                used.append(self._make(every))
            self._now = used[-1]
        return self._now.steps(batches, state)

    def span(self, kind: StepKind) -> AbstractContextManager[None]:
        return self._now.span(kind)

    def rare_span(self, kind: RareKind, state: TrainingState) -> AbstractContextManager[None]:
        return self._now.rare_span(kind, state)

    def close(self) -> None:
        for used in self._used.values():
            for timeline in used:
                timeline.close()


def order_of(rounds: int) -> list[str]:
    """The case of each epoch: every round has each case once, in an order of its own."""
    dice = random.Random(0)
    return [case for _ in range(rounds) for case in dice.sample(list(CASES), len(CASES))]


class EpochSeconds(Callback):
    """Wall time, and processor time of all threads of this process, of each epoch but the first."""

    def __init__(self) -> None:
        self.taken: dict[int, tuple[float, float]] = {}
        self._last: tuple[float, float] | None = None

    def on_epoch_end(self, state: TrainingState) -> None:
        now = time.perf_counter(), time.process_time()
        if self._last is not None:
            self.taken[state.epoch] = now[0] - self._last[0], now[1] - self._last[1]
        self._last = now


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


def seconds_by_case(manifest: ShardManifest, folder: Path, rounds: int) -> dict[str, list[list[float]]]:
    """Seconds of each case's epochs by clock and by processor, of all rounds but the first."""
    seconds, order = EpochSeconds(), order_of(rounds)
    config = config_of(manifest, folder / "run", timeline_every_steps=rounds, epochs=len(order))
    with mock.patch.object(observed, "RankTimeline", SwitchedTimeline):
        train_here(config, UserObjects(callbacks=(seconds,)))
    found: dict[str, list[list[float]]] = {case: [[], []] for case in CASES}
    for epoch in range(len(CASES) + 1, len(order) + 1):
        for values, value in zip(found[order[epoch - 1]], seconds.taken[epoch], strict=True):
            values.append(value)
    return found


def file_seconds(folder: Path) -> tuple[int, float]:
    """Bytes of a rank's largest file, and the processor's seconds that one write of it takes."""
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
    args = harness.parse(__doc__, stretch=(100, 2), rounds=(120, 2))
    torch.set_num_threads(1)
    rows = args.stretch * BATCH
    features = np.random.default_rng(0).normal(size=(rows, DIM)).astype(np.float32)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manifest = write({"features": features, "label": features[:, 0].copy()}, folder / "shards", BATCH)
        seconds = seconds_by_case(manifest, folder, args.rounds)
        table = []
        for case, of_case in seconds.items():
            line = [case, f"{1e3 * median(of_case[1]) / args.stretch:.3f}"]
            for values, bases in zip(of_case, seconds["off"], strict=True):
                ratios = [value / base for value, base in zip(values, bases, strict=True)]
                line += [f"{median(ratios):.4f}", "{:.4f} to {:.4f}".format(*interval(ratios))]
            table.append(line)
        harness.print_table(
            f"timeline_cost: {SPEC.kwargs}, {BATCH} rows a step, {len(seconds['off'][0])} rounds of "
            f"an epoch of {args.stretch} steps of each",
            [
                "recorded steps",
                "CPU ms a step",
                "clock to off",
                "95 % interval",
                "CPU to off",
                "95 % interval",
            ],
            table,
        )
        step_seconds = median(seconds["off"][1]) / args.stretch
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
        size, written = file_seconds(folder)
        harness.print_table(
            f"timeline_cost: a full file of a rank, median of {TRIALS} writes",
            ["MB", "CPU ms a write", "share of the time at most"],
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
