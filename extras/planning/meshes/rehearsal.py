"""Measures on a gang of this machine what the time of a step over a mesh is predicted from.

All ranks are at it together, as in a training: steps of two sizes, each rank for itself; products of
matrices and sums of vectors, which tell the one from the other; sums in groups of each size; and values that
neighbours send each other. So what is found is that of ranks which share the cores and memory of their host.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ringspark.estimators import user_code
from ringspark.estimators.collectives import Collective
from ringspark.estimators.launch.local import run_spawned
from ringspark.estimators.memory.columns import BatchColumn
from ringspark.estimators.options.mesh import Mesh
from ringspark.estimators.options.sync import AllReduce
from ringspark.estimators.training.phase import Status
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.extras.planning.exchange_time import Link, solve_link
from ringspark.extras.planning.meshes.machine import Rates
from ringspark.extras.planning.rehearsal import Rehearsal

# Of messages: a short one, and one that fills the memory that ranks of a host share.
SIZES = 1 << 10, 1 << 20
# Processes of this machine that are measured at most.
MOST_RANKS = 8
_MATRIX, _VECTOR = 384, 1 << 22


@dataclass(frozen=True, kw_only=True)
class MeasuredMachine:
    """What a gang found.

    Attributes:
        step_seconds: Rows -> seconds of a whole step of each rank.
        rates: Of operators, before they are fitted to the steps.
        inside: Number of ranks -> their link.
        wire: Link between two ranks that send to each other.
        num_ranks: Ranks that ran at a time.
    """

    step_seconds: dict[int, float]
    rates: Rates
    inside: dict[int, Link]
    wire: Link
    num_ranks: int


@dataclass(frozen=True, kw_only=True)
class MeshRehearsal:
    """What each rank of the gang runs.

    Attributes:
        steps: The steps; no rows for none.
    """

    steps: Rehearsal

    def __call__(self, collective: Collective, device: str, status: Status) -> str:
        torch.manual_seed(0)
        median, place = self.steps.median, torch.device(device)
        status.phase = "measuring steps"
        made = self.steps.make_steps(place)
        step_seconds = {rows: median(step, collective) for rows, step in made.items()}
        made.clear()
        status.phase = "measuring operators"
        rates = [median(run, collective) for run in _operators(place)]
        status.phase = "measuring exchanges"
        inside = {}
        for size in _divisors(collective.size):
            group = self._group(collective, size)
            sums = [torch.zeros(count // 4, device=place) for count in SIZES]
            inside[size] = [median(partial(group.all_reduce, s), collective) for s in sums]
        pair = self._group(collective, 2)
        sent = [median(partial(_there_and_back, pair, count, place), collective) / 2 for count in SIZES]
        return json.dumps([list(step_seconds.items()), rates, list(inside.items()), sent])

    def _group(self, collective: Any, size: int) -> Any:
        if size == collective.size:
            return collective
        return collective.part([range(r, r + size) for r in range(0, collective.size, size)])


def rehearse_meshes(
    config: TrainConfig,
    objects: UserObjects,
    inputs: Sequence[BatchColumn],
    labels: Sequence[BatchColumn],
    rows: tuple[int, ...],
    workers: int,
    repeats: int,
) -> MeasuredMachine:
    """Measures on `workers` processes of this machine, or `MOST_RANKS` if they are more.

    Args:
        rows: Two numbers of rows of a step, ascending; () measures no steps.

    Raises:
        WorkerError: A rank failed, for example since the network does not run on such rows.
    """
    num_ranks = next(n for n in range(min(workers, MOST_RANKS), 0, -1) if workers % n == 0 or n == 2)
    config = replace(
        config,
        num_workers=1,
        parallelism=Mesh(),
        gradient_accumulation=1,
        collective="torch",
        sync=AllReduce(),
    )
    steps = Rehearsal(
        config=config,
        objects=user_code.dumps(objects),
        inputs=tuple(inputs),
        labels=tuple(labels),
        rows=rows,
        sizes=SIZES,
        repeats=repeats,
    )
    work = MeshRehearsal(steps=steps)
    texts = run_spawned(num_ranks, "torch", work, timeout_seconds=120)
    steps_found, (product, sum_), groups, sent = json.loads(texts[0])
    flops, moved = 2 * _MATRIX**3, 3 * 4 * _VECTOR
    few, many = SIZES
    return MeasuredMachine(
        step_seconds=dict(steps_found),
        rates=Rates(launch=0.0, flop=product / flops, byte=sum_ / moved),
        inside={n: solve_link(n, (few, short), (many, long)) for n, (short, long) in groups},
        wire=_line_of(sent),
        num_ranks=num_ranks,
    )


def cores_here() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _line_of(sent: Sequence[float]) -> Link:
    (few, many), (short, long) = SIZES, sent
    beta = max(0.0, (long - short) / (many - few))
    return Link(alpha=max(0.0, short - few * beta), beta=beta)


def _operators(device: torch.device) -> list[Callable[[], object]]:
    matrix = torch.randn(_MATRIX, _MATRIX, device=device)
    one, other = (torch.zeros(_VECTOR, device=device) for _ in range(2))
    out = torch.empty_like(one)
    return [lambda: matrix @ matrix, lambda: torch.add(one, other, out=out)]


def _there_and_back(pair: Any, count: int, device: torch.device) -> None:
    there = torch.zeros(count // 4, device=device)
    peer = 1 - pair.rank
    for turn in (0, 1):
        (pair.start_send if pair.rank == turn else pair.start_receive)(there, peer)()


def _divisors(number: int) -> list[int]:
    return [n for n in range(2, number + 1) if number % n == 0]
