"""Calibration run: measures training steps and all-reduces of two sizes each, on a few local processes.

A step runs the trainer's own forward pass, backward pass and update on random rows. All ranks run it at the
same time, without communication. Rank 0 returns the median times.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from ringspark.estimators import user_code
from ringspark.estimators.collectives import Collective
from ringspark.estimators.launch.local import run_spawned
from ringspark.estimators.parallel.base import GradientSync
from ringspark.estimators.training.build import build_configured_optimizer, build_module
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.make_heads import make_heads
from ringspark.estimators.training.objective.criterion import Criterion
from ringspark.estimators.training.phase import Status
from ringspark.estimators.training.precision import LossScaler, keep_norms_fp32
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.estimators.training.step import Recipe, forward_backward
from ringspark.extras.planning.exchange_time import Link, solve_link
from ringspark.extras.planning.memory.columns import BatchColumn

SMALL_BYTES, LARGEST_BYTES = 1 << 10, 64 << 20
WARM_UPS = 2


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What each rank of the calibration run does.

    Attributes:
        objects: Pickled `UserObjects`.
        rows: Numbers of rows of the two step sizes.
        sizes: Numbers of bytes of the two all-reduces.
    """

    config: TrainConfig
    objects: bytes
    inputs: tuple[BatchColumn, ...]
    labels: tuple[BatchColumn, ...]
    rows: tuple[int, ...]
    sizes: tuple[int, int]
    repeats: int

    def __call__(self, collective: Collective, device: str, status: Status) -> str:
        status.phase = "measuring steps"
        torch.manual_seed(0)
        steps = self.make_steps(torch.device(device))
        step_seconds = {rows: self.median(step, collective) for rows, step in steps.items()}
        status.phase = "measuring all-reduces"
        sums = []
        for number, size in enumerate(self.sizes if collective.size > 1 else ()):
            buffer = torch.zeros(size // 4, device=device)
            sums.append(self.median(partial(_all_reduce, collective, buffer, str(number)), collective))
        return json.dumps([list(step_seconds.items()), sums])

    def median(self, function: Callable[[], object], collective: Collective) -> float:
        seconds = []
        for _ in range(WARM_UPS + self.repeats):
            collective.barrier()
            start = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - start)
        return median(seconds[WARM_UPS:])

    def make_steps(self, device: torch.device) -> dict[int, Callable[[], None]]:
        objects = user_code.loads(self.objects)
        module = build_module(self.config, objects).to(device).train()
        if self.config.precision != "fp32":
            keep_norms_fp32(module)
        sync = GradientSync(module, build_configured_optimizer(self.config, objects, module))
        scaler = LossScaler(self.config.precision, device, None, guards=False)
        criterion = Criterion(make_heads(self.config, objects), device)
        recipe = Recipe(config=self.config, criterion=criterion, scaler=scaler, device=device)

        def step(batch: Batch) -> None:
            sync.optimizer.zero_grad()
            forward_backward(recipe, sync, batch, float(batch.num_rows), keeps_outputs=False)
            sync.step(scaler)
            scaler.update()

        made: dict[int, Callable[[], None]] = {}
        for rows in self.rows:
            inputs, labels = (tuple(_example(c, rows, device) for c in s) for s in (self.inputs, self.labels))
            batch = Batch(inputs=inputs, labels=labels, weight=None)
            made[rows] = partial(step, batch)
        return made


def _all_reduce(collective: Collective, buffer: torch.Tensor, name: str) -> None:
    collective.start_sum(buffer, name)()


def _example(column: BatchColumn, rows: int, device: torch.device) -> torch.Tensor:
    shape = (rows, *column.shape[1:])
    if column.dtype == torch.int64:
        # 0 is a valid id and class of every network.
        return torch.zeros(shape, dtype=column.dtype, device=device)
    return torch.randn(shape, device=device)


def calibrate(calibration: Calibration, num_ranks: int) -> tuple[dict[int, float], Link]:
    """Returns the seconds of a step by number of rows, and the `Link` between `num_ranks` local processes.

    Raises:
        WorkerError: A rank failed.
    """
    texts = run_spawned(num_ranks, calibration.config.collective, calibration, timeout_seconds=120)
    steps, sums = json.loads(texts[0])
    small, large = zip(calibration.sizes, sums, strict=True)
    return dict(steps), solve_link(num_ranks, small, large)
