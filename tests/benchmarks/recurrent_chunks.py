"""Bubbles of recurrent pipelines by sequence chunks, and the cost of smaller chunks.

Each rank has one layer that sleeps instead of computing, in proportion to the chunk: once in the forward
pass, and twice as long in the backward pass, with `gpipe`. So the timelines match separate devices on any
number of cores, and the measured idle time includes sending. The second table is one process that computes a
stack of GRU layers. It compares the time of a step in chunks with whole rows, which is the cost of smaller
matrices.
"""

from __future__ import annotations

import json
import time
from functools import partial
from statistics import median
from typing import Any

import harness
import torch
from simulation import bubble_share
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.launch.local import run_spawned
from ringspark.estimators.options.mesh import Pipeline
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.phase import Status
from ringspark.extras.model_parallel.pipeline import PipelinePasses, build_pipeline
from ringspark.extras.model_parallel.pipeline.actions import Action, PassType
from ringspark.extras.model_parallel.pipeline.executor import Timed
from ringspark.models import Link, ModelSpec
from ringspark.models.chain import State, run_links

TIMES = 64
CHUNKS = (1, 2, 4, 8)
# Ranks -> micro-batches per step.
GANGS = {2: (1,), 4: (1, 4)}


class Sleep(torch.autograd.Function):
    """The identity, which sleeps in the forward pass, and twice as long in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = 2 * seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradient, None


class SleepingStack(nn.Module):
    """Layers over time. The state of a layer is its last output."""

    def __init__(self, depth: int, seconds: float) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(depth))
        self.seconds = seconds

    def links(self) -> list[Link]:
        return [
            Link(str(i), partial(self._whole, weight), (f"weights.{i}",), partial(self._along, weight))
            for i, weight in enumerate(self.weights)
        ]

    def forward(self, x: torch.Tensor) -> Any:
        return run_links(self.links(), (x,))

    def _whole(self, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self._along(weight, None, x)[0]

    def _along(self, weight: torch.Tensor, state: State, x: torch.Tensor) -> tuple[torch.Tensor, State]:
        y: torch.Tensor = Sleep.apply(x * weight, self.seconds * x.shape[1] / TIMES)
        return (y if state is None else y + 0.1 * state[0]), (y[:, -1:],)


def step(passes: PipelinePasses, inputs: list[torch.Tensor]) -> None:
    passes.train([(x,) for x in inputs], lambda y, index: y.square().sum())


def timelines(
    seconds: float,
    repeats: int,
    cases: list[tuple[int, int]],
    collective: Collective,
    device: str,
    status: Status,
) -> str:
    """Runs on every rank. Returns its actions in each recorded step of each (micro-batches, chunks)."""
    found = []
    for num_micro, chunks in cases:
        options = Pipeline(schedule="gpipe", sequence_chunks=chunks)
        mesh = RankMesh.of(collective, {"pipeline": collective.size})
        passes = build_pipeline(SleepingStack(collective.size, seconds), mesh, options)
        inputs = [torch.randn(2, TIMES, 4) for _ in range(num_micro)]
        step(passes, inputs)
        rounds = []
        for _ in range(repeats):
            collective.barrier()
            passes.record()
            step(passes, inputs)
            assert passes.timeline is not None
            rounds.append([(*timed.action, timed.begin, timed.end) for timed in passes.timeline])
        found.append(rounds)
    return json.dumps(found)


def measured(ranks: int, cases: list[tuple[int, int]], seconds: float, repeats: int) -> list[list[str]]:
    """Returns a line per case: the median idle share, and the median seconds of a step's passes."""
    task = partial(timelines, seconds, repeats, cases)
    told = [json.loads(text) for text in run_spawned(ranks, "torch", task, timeout_seconds=300)]
    table = []
    for number, (num_micro, chunks) in enumerate(cases):
        shares, lengths = [], []
        for i in range(repeats):
            lines = [
                [Timed(Action(PassType(k), s, m), b, e) for k, s, m, b, e in rank[number][i]] for rank in told
            ]
            shares.append(bubble_share(lines))
            every = [timed for line in lines for timed in line]
            lengths.append(max(t.end for t in every) - min(t.begin for t in every))
        theory = (ranks - 1) / (chunks * num_micro + ranks - 1)
        words = [str(ranks), str(num_micro), str(chunks)]
        table.append([*words, f"{median(shares):.3f}", f"{theory:.3f}", f"{median(lengths):.2f}"])
    return table


def computing(hidden: int, steps: int) -> list[list[str]]:
    """Times two stages of a GRU stack in one process, which runs them alternately by chunks."""
    spec = ModelSpec("recurrent", {"in_features": hidden, "hidden": hidden, "depth": 4, "out_features": 1})
    x = torch.randn(32, TIMES, hidden)
    mesh = RankMesh.of(LocalCollective())
    made = {
        chunks: build_pipeline(
            spec.build(), mesh, Pipeline(schedule="interleaved", virtual=2, sequence_chunks=chunks)
        )
        for chunks in CHUNKS
    }
    seconds: dict[int, list[float]] = {chunks: [] for chunks in CHUNKS}
    for number in range(steps + 1):
        for chunks, passes in made.items():
            begin = time.perf_counter()
            step(passes, [x])
            if number:
                seconds[chunks].append(time.perf_counter() - begin)
    ratios = {c: [a / b for a, b in zip(seconds[c], seconds[1], strict=True)] for c in CHUNKS}
    return [[str(c), f"{median(seconds[c]):.3f}", f"{median(ratios[c]):.2f}"] for c in CHUNKS]


def main() -> None:
    """Runs a gang for each number of ranks, then one process that computes."""
    options = harness.parse(__doc__, milliseconds=(480, 8), hidden=(256, 16), steps=(9, 1))
    table = []
    for ranks, micros in GANGS.items():
        cases = [(num_micro, chunks) for num_micro in micros for chunks in CHUNKS]
        table += measured(ranks, cases, options.milliseconds / 1000, min(options.repeats, 3))
    harness.print_table(
        f"recurrent_chunks: one layer per rank that sleeps {options.milliseconds} ms for {TIMES} time steps "
        "and twice as long backward, gpipe",
        ["ranks", "micro-batches", "chunks", "idle share", "theory", "seconds per step"],
        table,
    )
    harness.print_table(
        f"one process, 4 GRU layers of {options.hidden} in 2 stages, 32 rows of {TIMES} time steps",
        ["chunks", "seconds per step", "ratio to whole rows"],
        computing(options.hidden, options.steps),
    )


if __name__ == "__main__":
    main()
