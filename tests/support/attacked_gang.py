"""Trains on two ranks while attackers connect to their ports."""

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from ranks import run_ranks

from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel.data.gradient_all_reduce import synchronize

STRANGER = str(Path(__file__).parent / "stranger.py")
# The gang listens on 127.0.0.1, so 127.0.0.2 acts as another machine.
OTHER_MACHINE, SAME_MACHINE = "127.0.0.2", "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Attacked:
    """Result of a training. `reached` counts connections of attackers."""

    weights: list[str]
    grown_bytes: int
    grown_descriptors: int
    reached: int


def run(collective: str, folder: Path, *, steps: int, attacked: bool) -> Attacked:
    """Trains on 2 spawned ranks. With `attacked`, one attacker on another machine starts before the ranks
    connect, and one on the same machine starts afterwards.

    Raises:
        WorkerError: The gang did not survive.
    """
    stop_file = folder / f"stop-{collective}-{time.monotonic_ns()}"
    work = partial(_train, steps=steps, stop_file=str(stop_file) if attacked else "", gang=os.getpid())
    with _stranger(os.getpid(), stop_file, OTHER_MACHINE, attacked) as outside:
        try:
            ranks = run_ranks(2, collective, work, timeout_seconds=60)
        finally:
            stop_file.touch()
    return Attacked(
        weights=[rank["weights"] for rank in ranks],
        grown_bytes=max(rank["grown_bytes"] for rank in ranks),
        grown_descriptors=max(rank["grown_descriptors"] for rank in ranks),
        reached=sum(outside) + sum(sum(rank["strangers"]) for rank in ranks),
    )


@contextmanager
def _stranger(gang: int, stop_file: Path, source: str, wanted: bool) -> Iterator[list[int]]:
    """Runs an attacker in a new process; appends its number of connections when the block ends."""
    counts: list[int] = []
    if not wanted:
        yield counts
        return
    command = [sys.executable, STRANGER, str(gang), str(stop_file), source]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        yield counts
        stop_file.touch()
        counts.append(int(process.communicate(timeout=60)[0]))


def _train(collective: Collective, *, steps: int, stop_file: str, gang: int) -> Any:
    near = Path(f"{stop_file}-near")
    wanted = bool(stop_file) and collective.rank == 0
    process = psutil.Process()
    with _stranger(gang, near, SAME_MACHINE, wanted) as counts:
        before = (0, 0)
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        sync = synchronize(module, torch.optim.Adam(module.parameters(), lr=0.01), collective)
        scaler: Any = torch.amp.GradScaler("cpu", enabled=False)
        for step in range(steps):
            rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(2 * step + collective.rank))
            sync.optimizer.zero_grad()
            with sync.micro_batch(True):
                (sync.module(rows).square().sum() / 32 * sync.loss_factor).backward()
            sync.reduce()
            sync.step(scaler)
            if stop_file:
                time.sleep(0.005)
            if step == steps // 4:
                before = (process.memory_info().rss, process.num_fds())
        grown = (process.memory_info().rss - before[0], process.num_fds() - before[1])
        weights = b"".join(p.detach().numpy().tobytes() for p in module.parameters())
        result = hashlib.sha256(weights).hexdigest()
    return {"weights": result, "grown_bytes": grown[0], "grown_descriptors": grown[1], "strangers": counts}
