"""Calibration run for meshes: measures steps, operators and links with processes on this machine.

All ranks run at the same time, so they share cores and memory as in a training. A matrix product gives the
time per FLOP, and a vector sum the time per byte.
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
from ringspark.estimators.options.mesh import Mesh
from ringspark.estimators.options.sync import AllReduce
from ringspark.estimators.training.phase import Status
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.extras.planning.calibration import Calibration
from ringspark.extras.planning.exchange_time import Link, solve_link
from ringspark.extras.planning.memory.columns import BatchColumn
from ringspark.extras.planning.meshes.machine import OperatorRates

# Bytes of a short message, and of one that fills the ranks' shared memory.
SIZES = 1 << 10, 1 << 20
# Largest number of processes.
MOST_RANKS = 8
_MATRIX, _VECTOR = 384, 1 << 22


@dataclass(frozen=True, kw_only=True)
class HardwareProfile:
    """Operator and link speeds measured by a calibration run.

    Attributes:
        step_seconds: Seconds of a step without communication, by its number of rows.
        rates: Speeds of a matrix product and of a vector sum, not yet scaled to the measured steps.
        inside: Links for an all-reduce, by its number of ranks.
        wire: Link for a point-to-point send.
        num_ranks: Number of ranks that ran at the same time.
    """

    step_seconds: dict[int, float]
    rates: OperatorRates
    inside: dict[int, Link]
    wire: Link
    num_ranks: int


@dataclass(frozen=True, kw_only=True)
class MeshCalibration(Calibration):
    """What each rank of the calibration run does; it measures no steps if `rows` is empty."""

    def __call__(self, collective: Collective, device: str, status: Status) -> str:
        torch.manual_seed(0)
        median, place = partial(self.median, collective=collective), torch.device(device)
        status.phase = "measuring steps"
        made = self.make_steps(place)
        step_seconds = {rows: median(step) for rows, step in made.items()}
        made.clear()
        status.phase = "measuring operators"
        rates = [median(run) for run in _operators(place)]
        status.phase = "measuring exchanges"
        inside = {}
        for size in (n for n in range(2, collective.size + 1) if collective.size % n == 0):
            group = _group(collective, size)
            sums = [torch.zeros(count // 4, device=place) for count in SIZES]
            inside[size] = [median(partial(group.all_reduce, s)) for s in sums]
        pair = _group(collective, 2)
        sent = [median(partial(_there_and_back, pair, count, place)) / 2 for count in SIZES]
        return json.dumps([list(step_seconds.items()), rates, list(inside.items()), sent])


def _group(collective: Any, size: int) -> Any:
    if size == collective.size:
        return collective
    return collective.part([range(r, r + size) for r in range(0, collective.size, size)])


def calibrate_mesh(
    config: TrainConfig,
    objects: UserObjects,
    inputs: Sequence[BatchColumn],
    labels: Sequence[BatchColumn],
    rows: tuple[int, ...],
    workers: int,
    repeats: int,
) -> HardwareProfile:
    """Measures with `workers` processes on this machine, but at most `MOST_RANKS`.

    Args:
        rows: Numbers of rows of two steps, ascending; () measures no steps.

    Raises:
        WorkerError: A rank failed.
    """
    num_ranks = next(n for n in range(min(workers, MOST_RANKS), 0, -1) if workers % n == 0 or n == 2)
    calibration = MeshCalibration(
        config=replace(config, parallelism=Mesh(), collective="torch", sync=AllReduce()),
        objects=user_code.dumps(objects),
        inputs=tuple(inputs),
        labels=tuple(labels),
        rows=rows,
        sizes=SIZES,
        repeats=repeats,
    )
    texts = run_spawned(num_ranks, "torch", calibration, timeout_seconds=120)
    steps, (product, sum_), groups, sent = json.loads(texts[0])
    flops, moved = 2 * _MATRIX**3, 3 * 4 * _VECTOR
    few, many = SIZES
    beta = max(0.0, (sent[1] - sent[0]) / (many - few))
    return HardwareProfile(
        step_seconds=dict(steps),
        rates=OperatorRates(launch=0.0, flop=product / flops, byte=sum_ / moved),
        inside={n: solve_link(n, (few, short), (many, long)) for n, (short, long) in groups},
        wire=Link(alpha=max(0.0, sent[0] - few * beta), beta=beta),
        num_ranks=num_ranks,
    )


def count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
