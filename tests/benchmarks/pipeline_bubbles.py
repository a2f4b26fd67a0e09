"""Pipeline bubbles by schedule: measured idle time against the closed forms, with a chart.

4 ranks run 8 layers that sleep instead of computing, so that the timelines match 4 devices on any number of
cores. A layer sleeps once in the forward pass, once for the gradient of its input, and once for the gradient
of its weight. The measured idle time includes sending. The second table compares 2 ranks that compute with
one process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from statistics import mean, median
from typing import Any

import harness
import torch
from simulation import bubble_share, count_live
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.launch.local import run_spawned
from ringspark.estimators.options.mesh import Pipeline
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.phase import Status
from ringspark.extras.model_parallel.pipeline import (
    SCHEDULES,
    PipelinePasses,
    build_pipeline,
)
from ringspark.extras.model_parallel.pipeline.actions import Action, PassType
from ringspark.extras.model_parallel.pipeline.executor import Timed

RANKS, LAYERS, MICROS = 4, 8, 8
# Recorded steps of a schedule without a flush, after the same number of steps to fill the pipeline.
STEADY = 3
WAYS: dict[str, tuple[str, int]] = {
    "naive": ("naive", 1),
    "gpipe": ("gpipe", 1),
    "1f1b": ("1f1b", 1),
    "interleaved, 2 a rank": ("interleaved", 2),
    "zero_bubble": ("zero_bubble", 1),
    "zero_bubble, 2 a rank": ("zero_bubble", 2),
    "zbv": ("zbv", 2),
    "pipedream": ("pipedream", 1),
    "2bw": ("2bw", 1),
}
THEORY: dict[str, Callable[[int, int, int], float]] = {
    "naive": lambda p, v, m: (p - 1) / p,
    "gpipe": lambda p, v, m: (p - 1) / (m + p - 1),
    "1f1b": lambda p, v, m: (p - 1) / (m + p - 1),
    "interleaved": lambda p, v, m: (p - 1) / (v * m + p - 1),
    "zero_bubble": lambda p, v, m: (p - 1) / (3 * v * m + p - 1),
    "zbv": lambda p, v, m: (p - 1) / (3 * v * m + p - 1),
    "pipedream": lambda p, v, m: 0.0,
    "2bw": lambda p, v, m: 0.0,
}
COLOURS = {"F": "#4c78a8", "B": "#f58518", "I": "#f2b56b", "W": "#54a24b"}


class Sleep(torch.autograd.Function):
    """The identity, with sleeps in the forward and backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradient, None, None


class SleepingLayer(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Two operations, so that the gradients of input and weight take their time separately.
        out: torch.Tensor = Sleep.apply(x, self.seconds, self.seconds) + Sleep.apply(
            self.weight, 0, self.seconds
        )
        return out


def options_of(way: str) -> Pipeline:
    schedule, virtual = WAYS[way]
    return Pipeline(schedule=schedule, virtual=virtual)


def step(passes: PipelinePasses, inputs: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    passes.train([(x,) for x in inputs], lambda y, index: y.float().square().sum())
    optimizer.step()


def timelines(
    way: str, seconds: float, repeats: int, collective: Collective, device: str, status: Status
) -> str:
    """Runs on every rank. Returns its actions in each recorded round, and the most live micro-batches."""
    network = nn.Sequential(*(SleepingLayer(seconds) for _ in range(LAYERS)))
    passes = build_pipeline(network, RankMesh.of(collective, {"pipeline": RANKS}), options_of(way), MICROS)
    optimizer = torch.optim.SGD(network.parameters(), 0.01)
    inputs = [torch.randn(2, 4) for _ in range(MICROS)]
    steps = STEADY if passes.late else 1
    for _ in range(steps):
        step(passes, inputs, optimizer)
    rounds = []
    for _ in range(repeats):
        if not passes.late:
            collective.barrier()
        passes.record()
        for _ in range(steps):
            step(passes, inputs, optimizer)
        assert passes.timeline is not None
        rounds.append([(*timed.action, timed.begin, timed.end) for timed in passes.timeline])
    while passes.steps_in_flight:
        passes.drain()
    return json.dumps({"rounds": rounds, "live": passes.most_live})


def measured(way: str, seconds: float, repeats: int) -> tuple[list[list[list[Timed]]], list[int]]:
    """Returns the rounds as one timeline per rank, and the most live micro-batches by rank."""
    texts = run_spawned(RANKS, "torch", partial(timelines, way, seconds, repeats), timeout_seconds=120)
    told = [json.loads(text) for text in texts]
    rounds = [
        [
            [
                Timed(Action(PassType(k), stage, micro), begin, end)
                for k, stage, micro, begin, end in rank["rounds"][i]
            ]
            for rank in told
        ]
        for i in range(repeats)
    ]
    return rounds, [rank["live"] for rank in told]


def waiting(way: str, ranks: list[list[Timed]]) -> float:
    """Returns the idle share. Without a flush, each rank's time ends at its own last action."""
    if SCHEDULES[WAYS[way][0]].order is None:
        return mean(bubble_share([timeline]) for timeline in ranks)
    return bubble_share(ranks)


def computing(way: str, width: int, steps: int, collective: Collective, device: str, status: Status) -> str:
    """Runs on every rank. Returns the seconds of each step of a network that computes."""
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.GELU())]
    network = nn.Sequential(*layers)
    inputs = [torch.randn(64, width) for _ in range(MICROS)]
    optimizer: torch.optim.Optimizer
    if collective.size == 1:
        optimizer = torch.optim.SGD(network.parameters(), 1e-4)

        def take() -> None:
            optimizer.zero_grad()
            for x in inputs:
                network(x).square().sum().backward()
            optimizer.step()
    else:
        sample = (inputs[0],)
        passes = build_pipeline(
            network, RankMesh.of(collective, {"pipeline": collective.size}), options_of(way), MICROS, sample
        )
        optimizer = torch.optim.SGD(network.parameters(), 1e-4)
        take = partial(step, passes, inputs, optimizer)
    seconds = []
    for number in range(steps + 2):
        begin = time.perf_counter()
        take()
        collective.barrier()
        if number >= 2:
            seconds.append(time.perf_counter() - begin)
    return json.dumps(median(seconds))


def draw(chart: str, drawn: dict[str, list[list[Timed]]], titles: dict[str, str]) -> None:
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    figure, rows = plt.subplots(len(drawn), 1, figsize=(11, 1.25 * len(drawn)), sharex=True, squeeze=False)
    for axes, (way, ranks) in zip(rows[:, 0], drawn.items(), strict=True):
        first = min(timed.begin for rank in ranks for timed in rank)
        for rank, timeline in enumerate(ranks):
            for (kind, stage, micro), begin, end in timeline:
                axes.broken_barh(
                    [(begin - first, end - begin)],
                    (rank - 0.45, 0.9),
                    facecolor=COLOURS[kind.value],
                    # The second stage of a rank has a lighter color.
                    alpha=1.0 if stage < RANKS else 0.6,
                    edgecolor="white",
                    linewidth=0.4,
                )
                axes.text(
                    (begin + end) / 2 - first, rank, str(micro % MICROS), ha="center", va="center", fontsize=5
                )
        axes.set_yticks(range(RANKS), [f"rank {rank}" for rank in range(RANKS)], fontsize=6)
        axes.set_ylim(-0.5, RANKS - 0.5)
        axes.set_title(titles[way], fontsize=8, loc="left", pad=2)
        axes.tick_params(axis="x", labelsize=6)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    rows[-1, 0].set_xlabel("seconds", fontsize=7)
    words = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}
    handles = [Patch(color=COLOURS[key], label=word) for key, word in words.items()]
    rows[0, 0].legend(
        handles=handles, fontsize=6, ncols=4, loc="lower right", bbox_to_anchor=(1, 1.05), frameon=False
    )
    figure.tight_layout(h_pad=0.3)
    figure.savefig(chart, dpi=110)


def main() -> None:
    """Runs a gang of 4 for each schedule. Then compares gangs of 2 that compute with one process."""
    options = harness.parse(__doc__, milliseconds=(30, 1), width=(512, 32), steps=(5, 1))
    seconds = options.milliseconds / 1000
    table, drawn, titles = [], {}, {}
    for way, (schedule, virtual) in WAYS.items():
        rounds, live = measured(way, seconds, options.repeats)
        shares = [waiting(way, ranks) for ranks in rounds]
        theory = THEORY[schedule](RANKS, virtual, MICROS)
        share = median(shares)
        drawn[way] = rounds[shares.index(min(shares))]
        titles[way] = f"{way}: {share:.1%} idle, {theory:.1%} in theory"
        length = max(t.end for rank in drawn[way] for t in rank) - min(
            t.begin for rank in drawn[way] for t in rank
        )
        known = SCHEDULES[schedule]
        expected = "-"
        if known.order is not None:
            expected = ", ".join(map(str, count_live(known.orders_by_rank(RANKS, virtual, MICROS))))
        steps = 1 if known.order is not None else STEADY
        table.append(
            [
                way,
                f"{share:.3f}",
                f"{theory:.3f}",
                f"{length / steps:.3f}",
                ", ".join(map(str, live)),
                expected,
            ]
        )
    harness.print_table(
        f"pipeline_bubbles: {RANKS} ranks, {LAYERS} layers that sleep {options.milliseconds} ms, "
        f"{MICROS} micro-batches",
        ["schedule", "idle share", "theory", "seconds per step", "live, by rank", "expected"],
        table,
    )
    if options.chart:
        draw(options.chart, drawn, titles)
    ways = ["naive", "gpipe", "1f1b", "interleaved, 2 a rank", "zero_bubble", "2bw"]
    ratios: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(options.repeats):
        alone = json.loads(run_spawned(1, "local", partial(computing, "", options.width, options.steps))[0])
        for way in ways:
            texts = run_spawned(2, "torch", partial(computing, way, options.width, options.steps))
            ratios[way].append(alone / json.loads(texts[0]))
    harness.print_table(
        f"2 computing ranks with one core each, {LAYERS} layers of {options.width}, "
        f"{MICROS} micro-batches of 64 rows",
        ["schedule", "speedup to one process", "at most"],
        [
            [way, f"{median(found):.2f}", f"{2 * (1 - THEORY[WAYS[way][0]](2, WAYS[way][1], MICROS)):.2f}"]
            for way, found in ratios.items()
        ],
    )


if __name__ == "__main__":
    main()
