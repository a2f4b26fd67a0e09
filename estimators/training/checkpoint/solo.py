"""Work with files that rank 0 does alone while the other ranks wait for it.

A slow store may take longer than `timeoutSeconds`, after which a waiting rank gives up and the driver takes a
rank for hung. So rank 0 notes each part of its work, and tells the others now and then that it goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ringspark.estimators.parallel.mesh import RankMesh

# Seconds between two messages, as short as the shortest sensible timeout needs.
TELL_SECONDS = 1.0


class Solo:
    """Every rank makes one and calls `end` equally often; rank 0 calls `progress` in between."""

    def __init__(self, mesh: RankMesh, tick: Callable[[], None]) -> None:
        """Args: tick: Notes progress of this rank."""
        self._mesh = mesh
        self._tick = tick
        self._told = time.monotonic()

    def progress(self) -> None:
        """Notes that a part of the work is done. Runs on rank 0."""
        self._tick()
        if time.monotonic() - self._told >= TELL_SECONDS:
            self._tell(is_over=False)

    def end(self) -> None:
        """Ends this work, or waits until it is over. Runs on every rank."""
        while not self._tell(is_over=True):
            self._tick()
        self._tick()

    def _tell(self, *, is_over: bool) -> bool:
        """Returns whether the work is over, as rank 0 says. Runs on every rank."""
        flag = torch.tensor([int(is_over)])
        self._mesh.world.broadcast([flag])
        self._told = time.monotonic()
        return bool(flag)
