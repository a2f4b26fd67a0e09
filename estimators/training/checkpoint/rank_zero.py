"""Work with files that rank 0 does alone while the other ranks wait for it.

The store may need longer than `timeoutSeconds`, so rank 0 reports progress about once per second.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ringspark.estimators.parallel.mesh import RankMesh

# As short as the shortest sensible timeout needs.
REPORT_SECONDS = 1.0


class RankZeroSection:
    """Makes the other ranks wait for rank 0: all ranks call `end`; before, only rank 0 calls `progress`."""

    def __init__(self, mesh: RankMesh, tick: Callable[[], None]) -> None:
        self._mesh = mesh
        self._tick = tick
        self._reported = time.monotonic()

    def progress(self) -> None:
        """Reports progress: to the driver, and about once per second to the other ranks."""
        self._tick()
        if time.monotonic() - self._reported >= REPORT_SECONDS:
            self._broadcast(is_over=False)

    def end(self) -> None:
        """Ends this work on rank 0; the other ranks wait for it. Runs on every rank."""
        while not self._broadcast(is_over=True):
            self._tick()
        self._tick()

    def _broadcast(self, *, is_over: bool) -> bool:
        flag = torch.tensor([int(is_over)])
        self._mesh.world.broadcast([flag])
        self._reported = time.monotonic()
        return bool(flag)
