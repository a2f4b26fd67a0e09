"""Asynchronous training with a slow worker: time to a loss by consistency, and loss by staleness.

4 ranks fit a small network to the same rows. A step takes a fixed time, by a sleep, and a multiple of it on
the last rank, so the number of cores does not matter. All ranks take the same number of steps. Rank 0 keeps
the weights after each of its steps, and their losses are computed afterwards. The second table is one
process: a server's table whose workers push in round-robin order, so that the staleness of each gradient is
the number of other workers.
"""

from __future__ import annotations

import json
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
from short_sync import sync_of
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.launch.local import run_spawned
from ringspark.estimators.options.sync import ParameterServer
from ringspark.estimators.parallel import STRATEGIES, SyncSettings
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.phase import Status
from ringspark.extras.asynchronous.table import ParameterTable

RANKS = 4
STEP_SECONDS = 0.004
ROWS, DIM, BATCH = 2000, 8, 32
RATE = 0.1
LATE_RATE = 0.02  # with staleness 7, a rate five times as large diverges
# Target loss as a share of the first loss.
TARGET = 0.1
WAYS: dict[str, dict[str, Any]] = {
    "all-reduce": {"name": "bsp"},
    "BSP": {"name": "ssp", "staleness": 0, "correction": "none"},
    "SSP 1": {"name": "ssp", "staleness": 1, "correction": "none"},
    "SSP 3": {"name": "ssp", "staleness": 3, "correction": "none"},
    "SSP 10": {"name": "ssp", "staleness": 10, "correction": "none"},
    "ASP": {"name": "asp", "correction": "none"},
    "Hogwild": {"name": "hogwild"},
}


class Always:
    """Accepts every step."""

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(ROWS, DIM, generator=generator)
    hidden = torch.randn(DIM, 4, generator=generator)
    return features, torch.tanh(features @ hidden).sum(1)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, 16), nn.Tanh(), nn.Linear(16, 1))


def loss_of(module: nn.Module, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (module(features)[:, 0] - labels).square().mean()


def train(way: str, factor: int, steps: int, collective: Collective, device: str, status: Status) -> str:
    """Runs on every rank. Rank 0 returns seconds and loss after each of its steps, and at the end."""
    features, labels = rows()
    exchange = SyncSettings(sync=sync_of(apart=WAYS[way]), timeout_seconds=120)
    sync = STRATEGIES[exchange.sync.strategy]().prepare(
        network(), lambda m: torch.optim.SGD(m.parameters(), lr=RATE), RankMesh.of(collective), exchange
    )
    generator = torch.Generator().manual_seed(1 + collective.rank)
    pause = STEP_SECONDS * (factor if collective.rank == collective.size - 1 else 1)
    scaler, kept = Always(), []
    collective.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        time.sleep(pause)
        own = torch.randint(0, ROWS, (BATCH // collective.size,), generator=generator)
        sync.optimizer.zero_grad()
        loss = loss_of(sync.module, features[own], labels[own]) / collective.size
        (loss * sync.loss_factor).backward()
        sync.reduce()
        sync.step(scaler)
        if collective.rank == 0:
            kept.append(
                (time.perf_counter() - start, [p.detach().clone() for p in sync.network.parameters()])
            )
    sync.settle()
    if collective.rank:
        return ""
    kept.append((time.perf_counter() - start, [p.detach().clone() for p in sync.network.parameters()]))
    module, curve = network(), []
    with torch.no_grad():
        first = loss_of(module, features, labels).item()
        for seconds, values in kept:
            for parameter, value in zip(module.parameters(), values, strict=True):
                parameter.copy_(value)
            curve.append((seconds, loss_of(module, features, labels).item() / first))
    return json.dumps(curve)


def curve_of(way: str, factor: int, steps: int) -> list[tuple[float, float]]:
    texts = run_spawned(RANKS, "torch", partial(train, way, factor, steps), timeout_seconds=120)
    return [(seconds, loss) for seconds, loss in json.loads(texts[0])]


def seconds_to(curve: list[tuple[float, float]]) -> float:
    """Returns the time until the loss is reached, or infinity."""
    return next((seconds for seconds, loss in curve if loss <= TARGET), float("inf"))


def late(workers: int, updates: int, corrects: bool, straggles: bool) -> float:
    """Returns the remaining share of the first loss after training with stale gradients.

    Args:
        workers: Number of workers in round-robin order; each gradient has staleness workers - 1.
        straggles: Whether the last worker pushes only in each tenth round, so 10 rounds late.
    """
    features, labels = rows()
    module = network()
    trained = list(module.parameters())
    flat = nn.Parameter(nn.utils.parameters_to_vector(trained).detach())
    first = loss_of(module, features, labels).item()
    optimizer = torch.optim.SGD([flat], lr=LATE_RATE)
    table = ParameterTable(
        {0: flat}, optimizer, workers, ParameterServer(correction="staleness" if corrects else "none")
    )
    seen = [table.pull(w, None, 0, None)[0] for w in range(workers)]
    generator = torch.Generator().manual_seed(1)
    for number in range(updates):
        worker, turn = number % workers, number // workers
        if straggles and worker == workers - 1 and turn % 10:
            continue
        nn.utils.vector_to_parameters(seen[worker], trained)
        own = torch.randint(0, ROWS, (BATCH,), generator=generator)
        gradients = torch.autograd.grad(loss_of(module, features[own], labels[own]), trained)
        # Without the server's division by the number of workers, so that updates keep their size.
        gradient = torch.cat([g.flatten() for g in gradients])
        table.push(worker, {0: gradient}, [{"lr": LATE_RATE * workers}], ends_step=True)
        seen[worker] = table.pull(worker, None, 0, None)[0]
    nn.utils.vector_to_parameters(flat.detach(), trained)
    return loss_of(module, features, labels).item() / first


def draw(chart: str, times: dict[str, list[float]], factors: list[int], curves: dict[str, Any]) -> None:
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    for way, found in times.items():
        # The target may not be reached, and in a tiny run by no rank.
        seconds = [value if math.isfinite(value) else math.nan for value in found]
        left.plot(factors, seconds, marker="o", label=way)
        xs, ys = zip(*curves[way], strict=True)
        right.plot(xs, ys, label=way)
    left.set(
        xlabel="slowdown of one worker", ylabel=f"seconds to {TARGET:.0%} of the first loss", xscale="log"
    )
    if any(math.isfinite(value) for found in times.values() for value in found):
        left.set_yscale("log")
    left.set_xticks(factors, [f"{factor} x" for factor in factors])
    left.minorticks_off()
    right.set(
        xlabel=f"seconds, one worker {factors[-1]} x slower", ylabel="share of the first loss", yscale="log"
    )
    right.axhline(TARGET, color="grey", linewidth=0.8, linestyle="--")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(chart, dpi=110)


def main() -> None:
    """Runs a gang per method and slowdown, in interleaved rounds; then prints the table of staleness."""
    options = harness.parse(__doc__, steps=(220, 4), updates=(3000, 40))
    factors = [1, 10] if options.tiny else [1, 2, 4, 10]
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    ends: dict[str, list[float]] = {way: [] for way in WAYS}
    curves: dict[str, Any] = {}
    for factor in factors:
        for way in WAYS:
            curves[way] = curve_of(way, factor, options.steps)
            times[way].append(seconds_to(curves[way]))
            ends[way].append(curves[way][-1][0])
    harness.print_table(
        f"stragglers: {RANKS} ranks, {options.steps} steps of {STEP_SECONDS * 1000:.0f} ms, one rank slower; "
        f"seconds to {TARGET:.0%} of the first loss, and final loss",
        ["consistency", *(f"{factor} x" for factor in factors), f"end at {factors[-1]} x", "loss left"],
        [
            [way, *(f"{s:.2f}" for s in times[way]), f"{ends[way][-1]:.2f}", f"{curves[way][-1][1]:.4f}"]
            for way in WAYS
        ],
    )
    late_by = (1, 2, 4, 8, 16, 32)
    harness.print_table(
        f"staleness: loss left after {options.updates} updates, by staleness of the gradients",
        ["correction", *(f"{workers - 1}" for workers in late_by), "7, one worker 10 x later"],
        [
            [
                name,
                *(f"{late(workers, options.updates, corrects, False):.4f}" for workers in late_by),
                f"{late(8, options.updates, corrects, True):.4f}",
            ]
            for name, corrects in (("none", False), ("staleness", True))
        ],
    )
    if options.chart:
        draw(options.chart, times, factors, curves)
        print(f"drawn to {Path(options.chart).name}")


if __name__ == "__main__":
    main()
