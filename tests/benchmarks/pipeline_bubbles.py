"""Pipeline bubbles by schedule: measured idle time against the closed forms.

4 ranks run 8 layers that sleep instead of computing, so that the timelines match 4 devices on any number of
cores. A layer sleeps once in the forward pass, once for the gradient of its input, and once for the gradient
of its weight. The measured idle time includes sending.

    OMP_NUM_THREADS=1 make bench ARGS="pipeline_bubbles"
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from statistics import mean, median
from typing import Any, NamedTuple

import harness
import torch
from simulation import bubble_share
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.launch.local import run_spawned
from ringspark.estimators.options.mesh import Pipeline
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.phase import Status
from ringspark.extras.model_parallel.pipeline.passes import PipelinePasses, build_pipeline
from ringspark.extras.model_parallel.pipeline.schedules import SCHEDULES

RANKS, LAYERS, MICROS = 4, 8, 8
# Recorded steps of a schedule without a flush, after the same number of steps to fill the pipeline.
STEADY = 3
# Schedule and stages per rank -> the idle share in theory, of p ranks and m micro-batches.
THEORY: dict[tuple[str, int], Callable[[int, int], float]] = {
    ("naive", 1): lambda p, m: (p - 1) / p,
    ("gpipe", 1): lambda p, m: (p - 1) / (m + p - 1),
    ("1f1b", 1): lambda p, m: (p - 1) / (m + p - 1),
    ("interleaved", 2): lambda p, m: (p - 1) / (2 * m + p - 1),
    ("zero_bubble", 1): lambda p, m: (p - 1) / (3 * m + p - 1),
    ("zero_bubble", 2): lambda p, m: (p - 1) / (6 * m + p - 1),
    ("zbv", 2): lambda p, m: (p - 1) / (6 * m + p - 1),
    ("pipedream", 1): lambda p, m: 0.0,
    ("2bw", 1): lambda p, m: 0.0,
}


class Busy(NamedTuple):
    """A time in which a layer works, in seconds of the host's monotonic clock."""

    begin: float
    end: float


# This rank's times.
BUSY: list[Busy] = []


def work(seconds: float) -> None:
    begin = time.monotonic()
    time.sleep(seconds)
    BUSY.append(Busy(begin, time.monotonic()))


class Sleep(torch.autograd.Function):
    """The identity, with sleeps in the forward and backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.seconds = backward
        work(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        work(ctx.seconds)
        return gradient, None, None


class SleepingLayer(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Two operations, so that the gradients of input and weight take their time separately.
        weight = Sleep.apply(self.weight, 0, self.seconds)
        out: torch.Tensor = Sleep.apply(x, self.seconds, self.seconds) + weight
        return out


def step(passes: PipelinePasses, inputs: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    passes.train([(x,) for x in inputs], lambda y, index: y.float().square().sum())
    optimizer.step()


def timelines(
    way: tuple[str, int], seconds: float, repeats: int, collective: Collective, device: str, status: Status
) -> str:
    """Runs on every rank. Returns the times in which it worked, in each recorded round."""
    network = nn.Sequential(*(SleepingLayer(seconds) for _ in range(LAYERS)))
    mesh, settings = RankMesh.of(collective, {"pipeline": RANKS}), Pipeline(schedule=way[0], virtual=way[1])
    passes = build_pipeline(network, mesh, settings, MICROS)
    optimizer = torch.optim.SGD(network.parameters(), 0.01)
    inputs = [torch.randn(2, 4) for _ in range(MICROS)]
    flushes = SCHEDULES[way[0]].order is not None
    steps = 1 if flushes else STEADY
    for _ in range(steps):
        step(passes, inputs, optimizer)
    rounds = []
    for _ in range(repeats):
        if flushes:
            collective.barrier()
        BUSY.clear()
        for _ in range(steps):
            step(passes, inputs, optimizer)
        rounds.append(list(BUSY))
    while passes.steps_in_flight:
        passes.drain()
    return json.dumps(rounds)


def main() -> None:
    """Runs a gang of 4 for each schedule."""
    options = harness.parse(__doc__, milliseconds=(30, 1))
    table = []
    for way, theory in THEORY.items():
        timeline = partial(timelines, way, options.milliseconds / 1000, options.repeats)
        told = [json.loads(text) for text in run_spawned(RANKS, "torch", timeline, timeout_seconds=120)]
        flushes = SCHEDULES[way[0]].order is not None
        shares, seconds = [], []
        for number in range(options.repeats):
            ranks = [[Busy(*times) for times in rank[number]] for rank in told]
            # Without a flush, each rank's time ends at its own last action.
            alone = [bubble_share([rank]) for rank in ranks]
            shares.append(bubble_share(ranks) if flushes else mean(alone))
            times = [one for rank in ranks for one in rank]
            length = max(one.end for one in times) - min(one.begin for one in times)
            seconds.append(length / (1 if flushes else STEADY))
        table.append(
            [
                way[0] + (f", {way[1]} per rank" if way[1] > 1 else ""),
                f"{median(shares):.3f}",
                f"{theory(RANKS, MICROS):.3f}",
                f"{median(seconds):.2f}",
            ]
        )
    harness.print_table(
        f"pipeline_bubbles: {RANKS} ranks, {LAYERS} layers that sleep {options.milliseconds} ms, "
        f"{MICROS} micro-batches, median of {options.repeats} steps",
        ["schedule", "idle share", "theory", "seconds per step"],
        table,
    )


if __name__ == "__main__":
    main()
