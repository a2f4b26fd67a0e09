"""The shared memory of `hogwild`."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.collectives.traffic import Member
from ringspark.extras.asynchronous.hogwild import share_memory


class _Killed(LocalCollective):
    """Rank 0 of two, which is killed at its first message to the other rank."""

    def __init__(self) -> None:
        super().__init__()
        self.member = Member(size=2)

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int] | None = None) -> list[torch.Tensor]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def test_a_killed_rank_leaves_no_shared_memory() -> None:
    before = set(Path("/dev/shm").glob("ringspark-hogwild-*"))
    if not (child := os.fork()):
        with suppress(BaseException):
            share_memory([nn.Parameter(torch.zeros(3))], _Killed(), 60)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert set(Path("/dev/shm").glob("ringspark-hogwild-*")) == before
