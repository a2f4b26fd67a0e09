"""Calibration run: measures training steps, links and operators with a few processes of this machine.

All ranks run at the same time, so they share cores and memory as in a training. A step runs the trainer's own
forward pass, backward pass and update on random rows, without communication. A matrix product gives the time
per FLOP, and a vector sum the time per byte. Rank 0 returns the median times.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch

from ringspark.estimators import user_code
from ringspark.estimators.collectives import Collective
from ringspark.estimators.launch.local import run_spawned
from ringspark.estimators.training.build import build_module
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.phase import Status
from ringspark.estimators.training.precision import keep_norms_fp32
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.estimators.training.step import forward_backward
from ringspark.extras.planning.exchange_time import Link, solve_link, solve_message
from ringspark.extras.planning.memory.columns import BatchColumn
from ringspark.extras.planning.memory.step import make_step
from ringspark.extras.planning.work import OperatorRates

# Bytes of a short message, and of one that fills the ranks' shared memory.
SIZES = 1 << 10, 1 << 20
_WARM_UPS = 2
_MATRIX, _VECTOR = 384, 1 << 22


@dataclass(frozen=True, kw_only=True)
class HardwareProfile:
    """Speeds measured by a calibration run.

    Attributes:
        step_seconds: Seconds of a step without communication, by its number of rows.
        inside: Links for an all-reduce, by its number of ranks.
        rates: Speeds of a matrix product and of a vector sum, not yet scaled to the measured steps.
        wire: Link for a point-to-point send.
    """

    step_seconds: dict[int, float]
    inside: dict[int, Link]
    rates: OperatorRates | None = None
    wire: Link | None = None


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What each rank of the calibration run does.

    Attributes:
        config: Config of one worker; its `collective` connects the ranks.
        objects: Pickled `UserObjects`.
        rows: Numbers of rows of the steps; () measures no steps.
        sizes: Bytes of the two messages.
        for_meshes: Whether to measure `rates`, `wire` and the links of smaller groups too. This needs the
            collective "torch".
    """

    config: TrainConfig
    objects: bytes
    inputs: Sequence[BatchColumn]
    labels: Sequence[BatchColumn]
    rows: Sequence[int]
    repeats: int
    sizes: tuple[int, int] = SIZES
    for_meshes: bool = True

    def run(self, num_ranks: int) -> HardwareProfile:
        """Measures with `num_ranks` processes of this machine. Raises WorkerError if a rank failed."""
        texts = run_spawned(num_ranks, self.config.collective, self, timeout_seconds=120)
        steps, groups, operators, sent = json.loads(texts[0])
        few, many = self.sizes
        inside = {n: solve_link(n, (few, short), (many, long)) for n, (short, long) in groups}
        profile = HardwareProfile(step_seconds=dict(steps), inside=inside)
        if not self.for_meshes:
            return profile
        flop, byte = operators[0] / (2 * _MATRIX**3), operators[1] / (3 * 4 * _VECTOR)
        wire = solve_message((few, sent[0]), (many, sent[1]))
        return replace(profile, rates=OperatorRates(launch=0.0, flop=flop, byte=byte), wire=wire)

    def __call__(self, collective: Collective, device: str, status: Status) -> str:
        torch.manual_seed(0)
        median, place = partial(self._median, collective), torch.device(device)
        status.phase = "measuring steps"
        step_seconds = [(rows, median(step)) for rows, step in self._make_steps(place).items()]
        status.phase = "measuring all-reduces"
        least = 2 if self.for_meshes else collective.size
        inside = []
        for size in (n for n in range(least, collective.size + 1) if collective.size % n == 0):
            group = _group(collective, size)
            sums = [torch.zeros(count // 4, device=place) for count in self.sizes]
            inside.append((size, [median(partial(group.all_reduce, s)) for s in sums]))
        rates, sent = [], []
        if self.for_meshes:
            status.phase = "measuring operators and messages"
            rates = [median(run) for run in _operators(place)]
            pair = _group(collective, 2)
            sent = [median(partial(_there_and_back, pair, count, place)) / 2 for count in self.sizes]
        return json.dumps([step_seconds, inside, rates, sent])

    def _median(self, collective: Collective, function: Callable[[], object]) -> float:
        seconds = []
        for _ in range(_WARM_UPS + self.repeats):
            collective.barrier()
            start = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - start)
        return median(seconds[_WARM_UPS:])

    def _make_steps(self, device: torch.device) -> dict[int, Callable[[], None]]:
        objects = user_code.loads(self.objects)
        module = build_module(self.config, objects).to(device).train()
        if self.config.precision != "fp32":
            keep_norms_fp32(module)
        sync, recipe = make_step(self.config, objects, module, device)

        def step(batch: Batch) -> None:
            sync.optimizer.zero_grad()
            forward_backward(recipe, sync, batch, float(batch.num_rows), keeps_outputs=False)
            sync.step(recipe.scaler)
            recipe.scaler.update()

        made: dict[int, Callable[[], None]] = {}
        for rows in self.rows:
            inputs, labels = (tuple(_example(c, rows, device) for c in s) for s in (self.inputs, self.labels))
            made[rows] = partial(step, Batch(inputs=inputs, labels=labels, weight=None))
        return made


def _group(collective: Any, size: int) -> Any:
    """Returns the group of `size` ranks that has this rank; None for a rank that is left over."""
    if size == collective.size:
        return collective
    return collective.part([range(end - size, end) for end in range(size, collective.size + 1, size)])


def _example(column: BatchColumn, rows: int, device: torch.device) -> torch.Tensor:
    shape = (rows, *column.shape[1:])
    if column.dtype == torch.int64:
        # 0 is a valid id and class of every network.
        return torch.zeros(shape, dtype=column.dtype, device=device)
    return torch.randn(shape, device=device)


def _operators(device: torch.device) -> list[Callable[[], object]]:
    matrix = torch.randn(_MATRIX, _MATRIX, device=device)
    one, other = (torch.zeros(_VECTOR, device=device) for _ in range(2))
    out = torch.empty_like(one)
    return [lambda: matrix @ matrix, lambda: torch.add(one, other, out=out)]


def _there_and_back(pair: Any, count: int, device: torch.device) -> None:
    there = torch.zeros(count // 4, device=device)
    for turn in (0, 1) if pair is not None else ():
        (pair.start_send if pair.rank == turn else pair.start_receive)(there, 1 - pair.rank)()
